// SPDX-License-Identifier: Apache-2.0
// Memory of the optimizer's step: its states, once, and its temporaries.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cost/optimizer_cost.h"
#include "memory/live_blocks.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

class OptimizerMemory {
 public:
  OptimizerMemory(const Plan& plan, bool on_device, LiveBlocks& blocks);

  // A step of a unit, -1: of all; where no buffer of the plan says what it takes.
  void Step(UnitId unit);
  // The temporaries of a step of all units have one buffer, of what is alive where that is most. Whether
  // their steps come to just that: then they are taken and dropped one by one, each as `block` says.
  bool Plays(const Buffer& buffer);
  void Play(MemoryBlock block);

 private:
  LiveBlocks& blocks_;
  const OptimizerSteps optimizer_;
  const bool on_device_;
  bool plan_says_it_ = false;
  std::vector<bool> states_made_;                                // [0]: of all units
  std::optional<std::vector<OptimizerTensorStep>> temporaries_;  // of a step of all units
};

}  // namespace shardplan::internal
