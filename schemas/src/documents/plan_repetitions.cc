// SPDX-License-Identifier: Apache-2.0
#include "documents/plan_repetitions.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

namespace shardplan {
namespace {

// Half a gigabyte of triggers: nobody's step, and more than a list may be made to.
constexpr std::size_t kMaxTriggers = std::size_t{1} << 24;

bool IsAgain(const Trigger& trigger, const Trigger& before) {
  return trigger.kind == before.kind && trigger.unit == before.unit &&
         trigger.occurrence == before.occurrence &&
         trigger.microbatch == std::int64_t{before.microbatch} + 1 &&
         trigger.instructions == before.instructions;
}

// How many triggers from `first` on are what stands `period` triggers before them.
std::size_t AgainFrom(const std::vector<Trigger>& triggers, std::size_t first, std::size_t period) {
  std::size_t next = first;
  while (next < triggers.size() && IsAgain(triggers[next], triggers[next - period])) ++next;
  return next - first;
}

bool BeginsMicrobatch(const std::vector<Trigger>& triggers, std::size_t at) {
  return at > 0 && triggers[at].microbatch != triggers[at - 1].microbatch;
}

}  // namespace

std::string Repeats<Trigger>::Append(std::vector<Trigger>& triggers, const RepeatedTriggers& entry) {
  const std::size_t period = static_cast<std::size_t>(entry.repeat.triggers);
  const std::size_t times = static_cast<std::size_t>(entry.repeat.times);
  if (period > triggers.size()) return fmt::format("at most the {} triggers before it", triggers.size());
  if (times > (kMaxTriggers - std::min(kMaxTriggers, triggers.size())) / period) {
    return fmt::format("at most {} triggers in a step", kMaxTriggers);
  }
  const std::size_t first = triggers.size() - period;
  std::int64_t last = 0;
  for (std::size_t t = first; t < triggers.size(); ++t) {
    last = std::max<std::int64_t>(last, triggers[t].microbatch);
  }
  if (last + entry.repeat.times > std::numeric_limits<std::int32_t>::max()) {
    return fmt::format("micro-batches up to {}", std::numeric_limits<std::int32_t>::max());
  }
  triggers.reserve(triggers.size() + period * times);
  for (std::size_t t = first; t < first + period * times; ++t) {
    Trigger again = triggers[t];
    ++again.microbatch;
    triggers.push_back(std::move(again));
  }
  return "";
}

// In a step no two triggers have the same kind, unit, occurrence and micro-batch: so each of them can only be
// a repetition of one, and its distance to that one is the period.
std::vector<Repeats<Trigger>::Place> Repeats<Trigger>::Find(const std::vector<Trigger>& triggers) {
  using Point = std::tuple<TriggerKind, UnitId, std::int32_t, std::int32_t>;
  std::vector<Place> places;
  std::map<Point, std::size_t> passed;
  std::size_t noted = 0;
  std::size_t last_period = 0, last_end = 0;  // what is equal at that distance ends there
  for (std::size_t t = 0; t < triggers.size();) {
    for (; noted < t; ++noted) {
      const Trigger& trigger = triggers[noted];
      passed[{trigger.kind, trigger.unit, trigger.occurrence, trigger.microbatch}] = noted;
    }
    const Trigger& trigger = triggers[t];
    const auto before =
        trigger.microbatch == 0
            ? passed.end()
            : passed.find({trigger.kind, trigger.unit, trigger.occurrence, trigger.microbatch - 1});
    if (before == passed.end()) {
      ++t;
      continue;
    }
    const std::size_t period = t - before->second;
    const bool is_known = period == last_period && t < last_end;
    const std::size_t again = is_known ? last_end - t : AgainFrom(triggers, t, period);
    last_period = period;
    last_end = t + again;
    const std::size_t times = again / period;
    if (times * period < 2) {
      ++t;
      continue;
    }
    // People find their way if it stands between two micro-batches, and it can where some of the rest is
    // equal.
    std::size_t at = t;
    for (std::size_t later = t; later <= t + again % period; ++later) {
      if (!BeginsMicrobatch(triggers, later)) continue;
      at = later;
      break;
    }
    places.push_back({at, {{static_cast<std::int32_t>(period), static_cast<std::int32_t>(times)}}});
    t = at + period * times;
  }
  return places;
}

}  // namespace shardplan
