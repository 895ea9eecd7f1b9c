// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "shardplan/schemas/program.h"

namespace shardplan {

// Hash of the distinguishing fields. Collisions are resolved by ==.
std::size_t InstructionSharing::Hash::operator()(const InstructionList& list) const {
  std::size_t hash = list.size();
  for (const Instruction& i : list) {
    for (const std::int32_t id : {static_cast<std::int32_t>(i.kind), i.stream, i.unit, i.src, i.dst, i.event,
                                  i.communicator, i.segment, i.microbatch_offset}) {
      hash = hash * 1'099'511'628'211u + static_cast<std::uint32_t>(id);
    }
  }
  return hash;
}

void InstructionSharing::Share(Trigger& trigger) {
  if (trigger.instructions.empty()) {
    trigger.instructions = {};
    return;
  }
  if (const auto known = lists_.find(trigger.instructions); known != lists_.end()) {
    trigger.instructions = *known;
    return;
  }
  trigger.instructions.Edit().shrink_to_fit();
  lists_.insert(trigger.instructions);
}

void ShareInstructions(Plan& plan) {
  InstructionSharing sharing;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) sharing.Share(trigger);
  }
}

}  // namespace shardplan
