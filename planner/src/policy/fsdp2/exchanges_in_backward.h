// SPDX-License-Identifier: Apache-2.0
// Exchanges of Muon that begin in the backward (Muon::begin_in_backward).
#pragma once

#include <set>

#include "policy/fsdp2/fsdp_param_group.h"
#include "policy/optimizer_memory.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp2 {

// A unit's gradients are final behind its last reduction before the optimizer steps.
class ExchangesInBackward {
 public:
  // All of it outlives this.
  ExchangesInBackward(const PolicyInput& input, OptimizerMemory& optimizer);

  // Called at each hook point, before what the policy does there.
  void Pass(const HookPoint& point);
  // Called behind each reduction. Emits the beginning of the exchanges that waited for this one alone.
  void Reduced(const FsdpParamGroup& group);

 private:
  OptimizerMemory& optimizer_;
  std::set<const HookPoint*> last_;  // where the backward of a unit ends for the last time before a step
  std::set<UnitId> passed_;          // units that are behind it
};

}  // namespace shardplan::fsdp2
