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
  const std::vector<SegmentEntry>& entries =
      plan.segments[static_cast<std::size_t>(instruction.segment)].entries;
  const SegmentEntry& at = entries[static_cast<std::size_t>(entry)];
  const auto* op = std::get_if<OperatorEvent>(&at);
  if (const auto* wait = std::get_if<CollectiveWaitEvent>(&at)) {
    for (const SegmentEntry& other : entries) {
      const auto* issued = std::get_if<OperatorEvent>(&other);
      if (issued != nullptr && issued->collective && issued->collective->work == wait->work) op = issued;
    }
  }
  return op != nullptr && op->collective ? op : nullptr;
}

bool WaitsForModelCollective(const Plan& plan, const Instruction& instruction, StreamId stream,
                             std::int32_t entry) {
  if (entry < 0 || !DescriptionOf(instruction.kind).segment || stream >= std::ssize(plan.streams))
    return false;
  const SegmentEntry& at =
      plan.segments[static_cast<std::size_t>(instruction.segment)].entries[static_cast<std::size_t>(entry)];
  return std::holds_alternative<CollectiveWaitEvent>(at) ||
         ModelCollectiveAt(plan, instruction, entry) != nullptr;
}

std::string EntryText(const Plan& plan, const Instruction& instruction, StreamId stream, std::int32_t entry) {
  const OperatorEvent* op = ModelCollectiveAt(plan, instruction, entry);
  const bool waits = WaitsForModelCollective(plan, instruction, stream, entry);
  if (op == nullptr) {  // a wait for one of an earlier segment
    return waits ? "wait for a collective of the model" : InstructionText(plan, instruction);
  }
  return fmt::format("{}{} on {}", waits ? "wait " : "", Name(op->collective->kind),
                     plan.communicators[static_cast<std::size_t>(op->collective->communicator)].name);
}

}  // namespace internal

}  // namespace shardplan
