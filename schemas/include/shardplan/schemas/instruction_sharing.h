// SPDX-License-Identifier: Apache-2.0
// Lets triggers that issue the same share one list of instructions (plan.h, [Note: equal micro-batches]).
#pragma once

#include <cstddef>
#include <functional>
#include <unordered_set>

#include "shardplan/schemas/plan.h"

namespace shardplan {

class InstructionSharing {
 public:
  // The list of `trigger` becomes that of the first trigger given with an equal one.
  void Share(Trigger& trigger);

 private:
  struct Hash {
    std::size_t operator()(const InstructionList& list) const;
  };
  std::unordered_set<InstructionList, Hash> lists_;
};

// Shares the lists of all triggers of all steps.
void ShareInstructions(Plan& plan);

}  // namespace shardplan
