// SPDX-License-Identifier: Apache-2.0
#include "passes/outside_reads.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {
namespace {

bool IsInside(ModuleId module, UnitId unit, const ModelIndex& index, const Partition& partition) {
  for (; module >= 0; module = index.parent[module]) {
    if (partition.unit_of_module[index.canonical[module]] == FirstGroupOf(partition, unit)) return true;
  }
  return false;
}

}  // namespace

std::optional<Error> ReadOutsideItsUnit(const Trace& trace, const ModelIndex& index,
                                        const Partition& partition) {
  for (const std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (std::size_t p = 0; p < passes->size(); ++p) {
      const std::vector<TraceEvent>& events = (*passes)[p].events;
      for (std::size_t i = 0; i < events.size(); ++i) {
        const auto* op = std::get_if<OperatorEvent>(&events[i]);
        if (op == nullptr || op->module < 0) continue;
        for (const ParameterId parameter : op->parameters) {
          const UnitId unit = OwnerOf(partition, parameter, op->module).unit;
          if (unit < 0 || IsInside(op->module, unit, index, partition)) continue;
          const std::string list = passes == &trace.forwards ? "forwards" : "backwards";
          return Error{.code = ErrorCode::kBadInput,
                       .message = fmt::format(
                           "{} of module {} reads {}, a parameter of unit {}, which is gathered for its "
                           "own modules: PyTorch reads a shard here. One unit has to be around both",
                           op->name, DisplayName(trace.modules[op->module].fqn),
                           trace.parameters[parameter].fqn, DisplayName(partition.units[unit].unit.fqn)),
                       .pointer = fmt::format("/{}/{}/events/{}", list, p, i)};
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace shardplan
