// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <string>

namespace shardplan::conformance {

// Cases whose events in PyTorch 2.15 are not planned yet. A case that begins to match leaves the list.
inline const std::set<std::string>& NotPlanned() {
  static const std::set<std::string> cases = {
      "fsdp2_215/dataclass_default_w2",
  };
  return cases;
}

}  // namespace shardplan::conformance
