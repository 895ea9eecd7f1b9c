// SPDX-License-Identifier: Apache-2.0
// Which sharded gradients FSDP1 adds to on rank 0: those in host memory where the ranks compute on a CPU, and
// those on the device.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::conformance {

// Whether rank 0, whose log it is, has a piece of the parameter.
bool HoldsPiece(const Plan& plan, const Unit& unit, const UnitParameter& parameter);

// [Note: offloaded gradients on a CPU]
// On a GPU the gradient of an earlier backward lies on another device than the flat parameter, and the new
// one overwrites it. If the ranks compute on the CPU, the runtime takes it for a gradient to accumulate into.
// With use_orig_params it is there even without an earlier backward: the post-forward shows the (zero) host
// gradient to the original parameters, and the next unshard takes that for a gradient that the user has set.
//
// [Note: gradients that a rank forgets]
// With use_orig_params the root's pre-forward drops a sharded gradient that no original parameter shows. On a
// rank whose shard has no element of a trainable parameter that is every gradient of the unit.
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
  // The reduced gradient is copied to the host: whether it is added to one there.
  bool Offload(UnitId unit);
  // The gradient is reduced on the device.
  void Reduce(UnitId unit);
  // Whether what was reduced last is added to a gradient that is there.
  bool AddsReduced(UnitId unit) const { return !units_[unit].dropped; }
  void StepInBackward(UnitId unit);
  void BackwardEnd(bool synchronised);
  void ZeroGrad();

 private:
  struct State {
    bool offloads = false;
    bool trains = false;
    bool holds = false;      // rank 0 has an element of a trainable parameter
    bool forgotten = false;  // the sharded gradient on the device, as no original parameter shows it
    bool dropped = false;    // ... when the last reduction ended
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
