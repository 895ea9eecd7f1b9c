// SPDX-License-Identifier: Apache-2.0
#include "text/plan_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "json/writer.h"
#include "names/enum_names.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 5> kKeywords = {"on", "via", "for", "because", kArrow};

template <typename T, typename GetName>
std::optional<std::string_view> NameIn(const std::vector<T>& list, std::int64_t id, GetName get_name) {
  if (id < 0 || id >= static_cast<std::int64_t>(list.size())) return std::nullopt;
  return get_name(list[static_cast<std::size_t>(id)]);
}

}  // namespace

bool IsBareCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_.*/+-").find(c) != std::string_view::npos;
}

FirstOperand FirstOperandOf(InstructionKind kind) {
  const InstructionDescription& is = DescriptionOf(kind);
  if (is.segment) return FirstOperand::kSegment;
  if (is.event) return FirstOperand::kEvent;
  return Has(is.dst) && !Has(is.src) ? FirstOperand::kDst : FirstOperand::kSrc;
}

std::string QuoteWord(std::string_view name) {
  const bool bare = !name.empty() && std::ranges::all_of(name, IsBareCharacter) &&
                    std::ranges::find(kKeywords, name) == kKeywords.end();
  return bare ? std::string(name) : JsonString(name);
}

std::string NumberWord(double value) { return fmt::format("{}", value == 0 ? 0.0 : value); }

std::optional<std::string_view> PlanWords::RawName(RefKind kind, std::int64_t id) const {
  const auto name = [](const auto& element) -> std::string_view { return element.name; };
  switch (kind) {
    case RefKind::kUnit:
      return NameIn(plan_.units, id, [](const Unit& unit) -> std::string_view { return unit.fqn; });
    case RefKind::kBuffer:
      return NameIn(plan_.buffers, id, name);
    case RefKind::kStream:
      return NameIn(plan_.streams, id, name);
    case RefKind::kEvent:
      return NameIn(plan_.events, id, [](const std::string& event) -> std::string_view { return event; });
    case RefKind::kCommunicator:
      return NameIn(plan_.communicators, id, name);
    case RefKind::kSegment:
      return NameIn(plan_.segments, id, name);
    case RefKind::kExchange:
      return NameIn(plan_.exchanges, id, name);
    default:
      return std::nullopt;
  }
}

std::string PlanWords::Word(RefKind kind, std::int64_t id) const {
  const std::optional<std::string_view> name = RawName(kind, id);
  if (!name.has_value()) return fmt::format("#{}", id);
  std::string word = kind == RefKind::kUnit && name->empty() ? std::string(kRootName) : QuoteWord(*name);
  if (names_ != nullptr && !names_->IsUnique(kind, id)) word += fmt::format("#{}", id);
  return word;
}

std::string PlanWords::Operands(const Instruction& instruction) const {
  struct Operand {
    FirstOperand place;
    RefKind kind;
    std::int32_t id;
    std::string_view key;
  };
  const std::array<Operand, 4> operands = {
      {{FirstOperand::kSegment, RefKind::kSegment, instruction.segment, "segment"},
       {FirstOperand::kEvent, RefKind::kEvent, instruction.event, "event"},
       {FirstOperand::kSrc, RefKind::kBuffer, instruction.src, "src"},
       {FirstOperand::kDst, RefKind::kBuffer, instruction.dst, "dst"}}};
  const FirstOperand first = FirstOperandOf(instruction.kind);
  const bool arrow = first == FirstOperand::kSrc && instruction.src != -1 && instruction.dst != -1;
  std::string line;
  for (const Operand& operand : operands) {
    if (operand.place == first && operand.id != -1) line += " " + Word(operand.kind, operand.id);
  }
  if (arrow) line += fmt::format(" {} {}", kArrow, Word(RefKind::kBuffer, instruction.dst));
  for (const Operand& operand : operands) {
    if (operand.place == first || operand.id == -1 || (arrow && operand.place == FirstOperand::kDst))
      continue;
    line += fmt::format(" {}={}", operand.key, Word(operand.kind, operand.id));
  }
  return line;
}

std::string PlanWords::Line(const Instruction& instruction) const {
  std::string line(EnumName(instruction.kind));
  line += Operands(instruction);
  if (instruction.microbatch_offset != 0) line += fmt::format(" mb={}", instruction.microbatch_offset);
  if (instruction.exchange != -1)
    line += fmt::format(" exchange={}", Word(RefKind::kExchange, instruction.exchange));
  if (instruction.matrix != -1) line += fmt::format(" matrix={}", instruction.matrix);
  if (instruction.parameter != -1) line += fmt::format(" parameter={}", instruction.parameter);
  if (instruction.divisor != 1.0) line += fmt::format(" divisor={}", NumberWord(instruction.divisor));
  if (instruction.reduce_op != ReduceOp::kSum) line += fmt::format(" op={}", EnumName(instruction.reduce_op));
  if (instruction.stream != -1) line += " on " + Word(RefKind::kStream, instruction.stream);
  if (instruction.communicator != -1)
    line += " via " + Word(RefKind::kCommunicator, instruction.communicator);
  for (std::size_t i = 0; i < instruction.safe_after.size(); ++i) {
    line += (i == 0 ? " safe_after=" : ",") + Word(RefKind::kStream, instruction.safe_after[i]);
  }
  for (std::size_t i = 0; i < instruction.parts.size(); ++i) {
    line += fmt::format("{}{}", i == 0 ? " parts=" : ",", instruction.parts[i]);
  }
  if (instruction.unit != -1) line += " for " + Word(RefKind::kUnit, instruction.unit);
  if (!instruction.reason.empty()) line += " because " + QuoteWord(instruction.reason.str());
  return line;
}

std::string PlanWords::Line(const Trigger& trigger) const {
  std::string line(EnumName(trigger.kind));
  if (trigger.unit != -1) line += " " + Word(RefKind::kUnit, trigger.unit);
  if (trigger.microbatch != 0) line += fmt::format(" mb={}", trigger.microbatch);
  if (trigger.occurrence != 0) line += fmt::format(" occ={}", trigger.occurrence);
  return line;
}

std::string Describe(const Plan& plan, const Instruction& instruction) {
  return PlanWords(plan).Line(instruction);
}
std::string Describe(const Plan& plan, const Trigger& trigger, const Instruction& instruction) {
  return Describe(plan, AsWritten(trigger, instruction));
}
std::string Describe(const Plan& plan, const Trigger& trigger) { return PlanWords(plan).Line(trigger); }

}  // namespace shardplan
