// SPDX-License-Identifier: Apache-2.0
#include "training/instruction_ranges.h"

#include <fmt/format.h>

#include <string_view>

namespace shardplan::executor {

const std::string& InstructionRanges::NameOf(const Instruction& instruction) {
  if (names_.empty()) names_.resize(plan_.units.size() + 1);
  const BufferId buffer = instruction.dst >= 0 ? instruction.dst : instruction.src;
  UnitId unit = instruction.unit;
  if (unit < 0 && buffer >= 0) unit = plan_.buffers[buffer].unit;
  auto& names = unit < 0 ? names_.back() : names_[unit];
  std::string& name = names[static_cast<std::size_t>(instruction.kind)];
  if (name.empty()) {
    name = fmt::format("shardplan::{}", Name(instruction.kind));
    if (unit >= 0) name += " " + DisplayName(plan_.units[unit].fqn);
  }
  return name;
}

void InstructionRanges::Begin(const Instruction& instruction) {
  if (instruction.kind == InstructionKind::kCompute) return;
  record_.emplace(at::RecordScope::USER_SCOPE);
  record_->before(std::string_view(NameOf(instruction)));
}

}  // namespace shardplan::executor
