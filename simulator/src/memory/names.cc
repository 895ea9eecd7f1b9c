// SPDX-License-Identifier: Apache-2.0
// Names of categories, blocks, points and units.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "memory/categories.h"
#include "shardplan/simulator/memory_history.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

const Instruction* InstructionAt(const Plan& plan, const MemoryPoint& at) {
  if (at.step < 0 || at.trigger < 0 || at.instruction < 0) return nullptr;
  const auto& triggers = plan.steps[static_cast<std::size_t>(at.step)].triggers;
  if (static_cast<std::size_t>(at.trigger) >= triggers.size()) return nullptr;
  return &triggers[static_cast<std::size_t>(at.trigger)]
              .instructions[static_cast<std::size_t>(at.instruction)];
}

// The operator that allocates at `entry`: an operator's allocations stand before it.
std::string_view OperatorAt(const Segment& segment, std::int32_t entry) {
  for (auto e = static_cast<std::size_t>(std::max(entry, 0)); e < segment.entries.size(); ++e) {
    if (const auto* op = std::get_if<OperatorEvent>(&segment.entries[e])) return op->name;
  }
  return "";
}

}  // namespace

const std::vector<std::string>& MemoryCategories() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (std::int32_t r = 0; r < internal::kBufferRoles; ++r)
      names.emplace_back(Name(static_cast<BufferRole>(r)));
    for (std::int32_t r = 0; r < internal::kStorageRoles; ++r) {
      names.emplace_back(Name(static_cast<StorageRole>(r)));
    }
    names.emplace_back("kernel_temp");
    names.emplace_back("cublas_workspace");
    return names;
  }();
  return kNames;
}

std::string BlockName(const Plan& plan, const MemoryHistory& history, std::int32_t block) {
  const MemoryBlock& b = history.blocks[static_cast<std::size_t>(block)];
  const MemoryPoint& at = history.actions[static_cast<std::size_t>(b.born)].at;
  if (b.buffer >= 0) {
    const Buffer& buffer = plan.buffers[static_cast<std::size_t>(b.buffer)];
    const auto part = static_cast<std::size_t>(b.part);
    const bool per_parameter =
        buffer.parts_bytes.size() == buffer.parameters.size() && buffer.parts_bytes.size() > 1;
    if (!per_parameter || buffer.unit < 0 || part >= buffer.parameters.size()) return buffer.name;
    const Unit& unit = plan.units[static_cast<std::size_t>(buffer.unit)];
    const auto parameter = static_cast<std::size_t>(buffer.parameters[part]);
    if (parameter >= unit.parameters.size()) return buffer.name;
    return buffer.name + " " + unit.parameters[parameter].fqn;
  }
  if (b.category == internal::kCublasWorkspace) return "cuBLAS workspace";
  if (b.category == internal::CategoryOf(StorageRole::kInput) && at.trigger < 0) {
    return plan.inputs[static_cast<std::size_t>(b.part)].name;
  }
  if (at.step < 0) return plan.model_buffers[static_cast<std::size_t>(b.part)].fqn;
  const Instruction* instruction = InstructionAt(plan, at);
  if (instruction == nullptr) return "";
  if (instruction->kind == InstructionKind::kOptimizerStep) return "optimizer";
  if (instruction->segment < 0) return "";
  return std::string(OperatorAt(plan.segments[static_cast<std::size_t>(instruction->segment)], at.entry));
}

std::string PointText(const Plan& plan, const MemoryPoint& at) {
  if (at.step < 0) return "before the steps";
  const auto& triggers = plan.steps[static_cast<std::size_t>(at.step)].triggers;
  if (at.trigger < 0) return "the step's begin";
  if (static_cast<std::size_t>(at.trigger) >= triggers.size()) return "the step's end";
  const Trigger& trigger = triggers[static_cast<std::size_t>(at.trigger)];
  std::string text = internal::TriggerText(plan, trigger);
  const Instruction* instruction = InstructionAt(plan, at);
  if (instruction == nullptr) return text;
  if (instruction->kind != InstructionKind::kCompute || instruction->segment < 0) {
    if (!instruction->reason.empty() && instruction->reason.str() != Name(trigger.kind)) {
      text += " (" + instruction->reason.str() + ")";
    }
    return text;
  }
  return plan.segments[static_cast<std::size_t>(instruction->segment)].name + ", after " + text;
}

}  // namespace shardplan
