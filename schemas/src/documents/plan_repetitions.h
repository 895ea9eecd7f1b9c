// SPDX-License-Identifier: Apache-2.0
// Equal micro-batches are written once (docs/reference/plan-format.md, "Repetitions"): what stands for the
// others in a list of triggers.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "json/fields.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// The triggers before it, so many of them, again so many times: each time with the micro-batch one higher.
struct Repetition {
  std::int32_t triggers = 0;
  std::int32_t times = 0;
  bool operator==(const Repetition&) const = default;
};
template <>
inline constexpr Definition kDefinition<Repetition> = {.says = "Triggers again."};
template <>
inline constexpr auto kFields<Repetition> =
    FieldList(Required("triggers", &Repetition::triggers, "How many of the triggers before it.").AtLeast(1),
              Required("times", &Repetition::times, "How often they come again.").AtLeast(1));

// Its place in a list of triggers.
struct RepeatedTriggers {
  Repetition repeat;
};
template <>
inline constexpr Definition kDefinition<RepeatedTriggers> = {
    "plan", "repeated_triggers",
    "Stands for the triggers before it again, each time with the micro-batch one higher."};
template <>
inline constexpr auto kFields<RepeatedTriggers> = FieldList(Required("repeat", &RepeatedTriggers::repeat,
                                                                     "Which triggers, and how often."));

template <>
struct Repeats<Trigger> {
  using Entry = RepeatedTriggers;
  struct Place {
    std::size_t at = 0;  // index of the first trigger that it stands for
    RepeatedTriggers entry;
    std::size_t count() const {
      return static_cast<std::size_t>(entry.repeat.triggers) * static_cast<std::size_t>(entry.repeat.times);
    }
  };

  // Writes the repetition out behind `triggers`. Returns what was expected instead if it cannot be; "": it is
  // done.
  static std::string Append(std::vector<Trigger>& triggers, const RepeatedTriggers& entry);
  // Repetitions that may be left out of `triggers`, by place.
  static std::vector<Place> Find(const std::vector<Trigger>& triggers);
};

}  // namespace shardplan
