// SPDX-License-Identifier: Apache-2.0
#include "text/instruction_text.h"

#include <fmt/format.h>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan {

std::string UnitText(const Plan& plan, UnitId unit) {
  if (unit < 0 || static_cast<std::size_t>(unit) >= plan.units.size()) return "";
  return DisplayName(plan.units[static_cast<std::size_t>(unit)].fqn);
}

namespace internal {

std::string TriggerText(const Plan& plan, const Trigger& trigger) {
  std::string text(Name(trigger.kind));
  if (trigger.unit >= 0) text += " " + UnitText(plan, trigger.unit);
  if (trigger.microbatch > 0) text += fmt::format(" mb{}", trigger.microbatch);
  if (trigger.occurrence > 0) text += fmt::format(" #{}", trigger.occurrence);
  return text;
}

std::string InstructionText(const Plan& plan, const Instruction& instruction) {
  if (instruction.kind == InstructionKind::kCompute && instruction.segment >= 0 &&
      static_cast<std::size_t>(instruction.segment) < plan.segments.size()) {
    return plan.segments[static_cast<std::size_t>(instruction.segment)].name;
  }
  std::string text(Name(instruction.kind));
  UnitId unit = instruction.unit;
  for (const BufferId buffer : {instruction.dst, instruction.src}) {
    if (unit < 0 && buffer >= 0 && static_cast<std::size_t>(buffer) < plan.buffers.size()) {
      unit = plan.buffers[static_cast<std::size_t>(buffer)].unit;
    }
  }
  if (unit >= 0) return text + " " + UnitText(plan, unit);
  if (instruction.event >= 0 && static_cast<std::size_t>(instruction.event) < plan.events.size()) {
    return text + " " + plan.events[static_cast<std::size_t>(instruction.event)];
  }
  return text;
}

const OperatorEvent* ModelCollectiveAt(const Plan& plan, const Instruction& instruction, std::int32_t entry) {
  if (entry < 0 || !DescriptionOf(instruction.kind).segment) return nullptr;
  const Segment& segment = plan.segments[static_cast<std::size_t>(instruction.segment)];
  const auto* op = std::get_if<OperatorEvent>(&segment.entries[static_cast<std::size_t>(entry)]);
  return op != nullptr && op->collective ? op : nullptr;
}

std::string EntryText(const Plan& plan, const Instruction& instruction, std::int32_t entry) {
  const OperatorEvent* op = ModelCollectiveAt(plan, instruction, entry);
  if (op == nullptr) return InstructionText(plan, instruction);
  return fmt::format("{} on {}", Name(op->collective->kind),
                     plan.communicators[static_cast<std::size_t>(op->collective->communicator)].name);
}

}  // namespace internal

}  // namespace shardplan
