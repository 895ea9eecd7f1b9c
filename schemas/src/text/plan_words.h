// SPDX-License-Identifier: Apache-2.0
// The words of the plan's text form, shared by the writer, the parser, Describe() and the difference.
//
//   step steady
//     pre_forward layers.0
//       allocate layers.0.all_gather_output on all_gather for layers.0 because pre_forward
//       all_gather layers.0.all_gather_input -> layers.0.all_gather_output on all_gather via shard
//       wait layers.0.all_gather_done on compute
//       compute "forward layers.0" on compute
//
// A name is written as it is when it consists of letters, digits and _ . * / + - only and is no keyword, else
// as a JSON string. "(root)" is the unit named "". "#7" after a name (or alone) is the element with that
// number, for names that several elements share.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "json/fields.h"
#include "names/plan_names.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

inline constexpr std::string_view kArrow = "->";

// The kind of the operand right after the instruction's kind.
enum class FirstOperand : std::uint8_t { kSegment, kEvent, kSrc, kDst };
FirstOperand FirstOperandOf(InstructionKind kind);

// Names of elements of a plan as words. Without `names` it is not noticed that several elements have the same
// name.
class PlanWords {
 public:
  explicit PlanWords(const Plan& plan, const PlanNames* names = nullptr) : plan_(plan), names_(names) {}

  // The name of an element, or "#id" when the id is out of range.
  std::string Word(RefKind kind, std::int64_t id) const;
  // One line, not indented.
  std::string Line(const Instruction& instruction) const;
  std::string Line(const Trigger& trigger) const;

 private:
  std::optional<std::string_view> RawName(RefKind kind, std::int64_t id) const;
  std::string Operands(const Instruction& instruction) const;

  const Plan& plan_;
  const PlanNames* names_;
};

// Characters that a word without quotes may have.
bool IsBareCharacter(char c);
// A name as a word: bare if it can be, else a JSON string.
std::string QuoteWord(std::string_view name);
// A finite number as short as it reads back exactly.
std::string NumberWord(double value);

}  // namespace shardplan
