// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "replay/program.h"

namespace shardplan::executor {
namespace {

// Collectives of different units touch no memory of each other's. Collectives of the same unit may: a
// reduce-scatter and the all-reduce of what it gives, or two names of the same memory.
bool MayJoin(const Plan& plan, const Program& program, const Op& op, const std::vector<UnitId>& units) {
  const CollectiveSpec& spec = program.collectives[op.a];
  const UnitId unit = plan.buffers[spec.dst].unit;
  return unit >= 0 && std::ranges::find(units, unit) == units.end() && plan.buffers[spec.src].unit == unit;
}

// Is somebody told as soon as it is issued, or issues it in our place?
bool StandsAlone(const Op& op) { return op.last_reduction || op.final_gradient || op.extended; }

}  // namespace

void FindGroups(const Plan& plan, Program& program) {
  for (const ProgramTrigger& trigger : program.triggers) {
    std::vector<UnitId> units;  // of the group that could go on
    Op* last = nullptr;
    for (std::int32_t i = trigger.first; i < trigger.first + trigger.count; ++i) {
      Op& op = program.ops[i];
      if (op.code != OpCode::kCollective || StandsAlone(op)) {
        last = nullptr;
        continue;
      }
      const bool joins =
          last != nullptr && last->stream == op.stream &&
          program.collectives[last->a].communicator == program.collectives[op.a].communicator &&
          MayJoin(plan, program, op, units);
      if (!joins) units.clear();
      if (joins) {
        if (!last->ends_group) last->begins_group = true;
        last->ends_group = false;
        op.ends_group = true;
      }
      units.push_back(plan.buffers[program.collectives[op.a].dst].unit);
      last = &op;
    }
  }
}

}  // namespace shardplan::executor
