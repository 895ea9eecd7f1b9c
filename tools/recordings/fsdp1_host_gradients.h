// Which gradients in host memory FSDP1 adds to on ranks that compute on a CPU.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::conformance {

// [Note: offloaded gradients on a CPU]
// On a GPU the gradient of an earlier backward lies on another device than the flat parameter, and the new
// one overwrites it. Where the ranks compute on the CPU, the runtime takes it for a gradient to accumulate
// into. With use_orig_params it is there even without an earlier backward: the post-forward shows the (zero)
// host gradient to the original parameters, and the next unshard takes that for a gradient that the user has
// set.
class HostGradients {
 public:
  explicit HostGradients(const Plan& plan);

  void RootPreForward();
  // A unit is bound to its shard in its post-forward (with gradients enabled), or elsewhere.
  void Reshard(UnitId unit, bool in_forward, bool grad_enabled);
  void Unshard(UnitId unit);
  void PreBackward(UnitId unit);
  // A post-backward that does not reduce.
  void Accumulate(UnitId unit);
  // The reduced gradient goes to the host: whether it is added to one.
  bool Offload(UnitId unit);
  void StepInBackward(UnitId unit);
  void BackwardEnd(bool synchronised);
  void ZeroGrad();

 private:
  struct State {
    bool offloads = false;
    bool trains = false;
    bool shown = false;      // the original parameters' .grad
    bool flat = false;       // the flat parameter's, a shard
    bool unsharded = false;  // the flat parameter's, of micro-batches that did not reduce
    bool saved = false;      // _saved_grad_shard
    bool sharded_now = true;
    bool skipped_views = false;
  };

  bool original_parameters_ = false;
  bool reshards_after_forward_ = true;
  std::vector<State> units_;
};

}  // namespace shardplan::conformance
