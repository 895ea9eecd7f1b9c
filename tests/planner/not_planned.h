#pragma once

#include <set>
#include <string>

namespace shardplan::conformance {

// What PyTorch 2.15 does in these is not planned yet. A case that begins to match leaves the list.
inline const std::set<std::string>& NotPlanned() {
  static const std::set<std::string> cases = {
      "fsdp2_215/branchy_hsdp_noallreduce_unused_2x2",
      "fsdp2_215/branchy_rsunused_w2",
      "fsdp2_215/dataclass_default_w2",
      "fsdp2_215/gptish_bf16params_gradfp32_w2",
      "fsdp2_215/gptish_reset_bwd_w2",
      "fsdp2_215/gptish_reset_fwd_w2",
      "fsdp2_215/gptish_twomesh_raf_false_w4",
      "fsdp2_215/gptish_twomesh_w4",
  };
  return cases;
}

}  // namespace shardplan::conformance
