// SPDX-License-Identifier: Apache-2.0
// [Note: one clock for all ranks]
// Events of ranks and ends of what they do together are taken in order of time from one heap. Between two of
// its events nothing changes for a rank, so it is only brought up to date at an event of its own, or when a
// collective that it is in begins or ends.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/step_runner.h"

namespace shardplan::internal {

class RankClock {
 public:
  StepRunner& Runner(std::int32_t rank) { return runners_[static_cast<std::size_t>(rank)]; }
  std::int32_t size() const { return static_cast<std::int32_t>(runners_.size()); }

  void Reserve(std::size_t ranks) { runners_.reserve(ranks); }
  template <typename... Arguments>
  void Emplace(Arguments&&... arguments) {
    runners_.emplace_back(std::forward<Arguments>(arguments)...);
    next_ns_.push_back(kNever);
  }

  // The rank has changed: what it can do now is done before time goes on.
  void Touch(std::int32_t rank) { touched_.push_back(rank); }
  void BringTo(std::int32_t rank, std::int64_t time_ns) {
    Runner(rank).AdvanceTo(time_ns);
    Touch(rank);
  }
  void Schedule(std::int64_t time_ns, std::int32_t item) { events_.emplace(time_ns, false, item); }

  // Until nothing is left to happen. end(item, time_ns): an item was scheduled to end at that time; there may
  // be a later word on it.
  template <typename End>
  void Run(const End& end) {
    for (std::int32_t rank = 0; rank < size(); ++rank) Touch(rank);
    Settle();
    while (!events_.empty()) {
      const auto [time_ns, is_rank, index] = events_.top();
      events_.pop();
      if (is_rank) {
        std::int64_t& next_ns = next_ns_[static_cast<std::size_t>(index)];
        if (next_ns != time_ns) continue;  // there is a later word on it
        next_ns = kNever;
        BringTo(index, time_ns);
      } else {
        end(index, time_ns);
      }
      Settle();
    }
  }

 private:
  void Settle() {
    while (!touched_.empty()) {
      const std::int32_t rank = touched_.back();
      touched_.pop_back();
      const std::int64_t next_ns = Runner(rank).Settle();
      std::int64_t& known_ns = next_ns_[static_cast<std::size_t>(rank)];
      if (next_ns != kNever && next_ns != known_ns) events_.emplace(next_ns, true, rank);
      known_ns = next_ns;
    }
  }

  // Time, whether of a rank or of an item, and which: the order of events of one time is the same on every
  // machine.
  using Event = std::tuple<std::int64_t, bool, std::int32_t>;

  std::vector<StepRunner> runners_;
  std::vector<std::int64_t> next_ns_;  // by rank: its next event by itself
  std::vector<std::int32_t> touched_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace shardplan::internal
