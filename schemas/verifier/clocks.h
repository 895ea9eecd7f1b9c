// SPDX-License-Identifier: Apache-2.0
// Happens-before: one vector clock per stream, one for the host, one per event.
//
// Every piece of work gets the next tick of its own stream. A stream's clock says, for each other stream, up
// to which tick that one's work is finished before the next work issued on this stream may start. Streams are
// FIFO, so a tick stands for everything before it. The host takes part as one more stream: its clock is what
// it has waited for, and everything issued later starts after that.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::verifier {

// The position of an instruction in the program. {-1, -1, -1}: before the first step.
struct Position {
  std::int32_t step = -1;
  std::int32_t trigger = -1;
  std::int32_t instruction = -1;
  auto operator<=>(const Position&) const = default;
};

// One piece of work as issued: where it runs, its tick there, and the instruction.
struct Work {
  std::int32_t stream = -1;  // a stream of the plan, or Clocks::host()
  std::int32_t tick = 0;     // 0: never
  Position at;
};

class Clocks {
 public:
  Clocks(std::int32_t streams, std::int32_t events);

  std::int32_t host() const { return host_; }
  std::int32_t width() const { return host_ + 1; }

  // The next piece of work on `stream` (host() for work that the host does itself).
  Work Issue(std::int32_t stream, Position at);
  void Record(EventId event, StreamId stream);
  bool IsRecorded(EventId event) const { return recorded_[event]; }
  // `stream` (host() for a host wait) starts later work after the latest record of `event`.
  void Wait(std::int32_t stream, EventId event);

  // True if `earlier` is finished before work issued now on `stream` starts; nothing at all (tick 0) is.
  bool IsBefore(const Work& earlier, std::int32_t stream) const {
    SHARDPLAN_ASSERT(stream >= 0 && stream <= host_,
                     "CheckInstruction lets only streams of the plan through");
    return earlier.tick == 0 || earlier.tick <= Row(stream)[earlier.stream];
  }

  // A stream that waits for something that never happens is stuck from there on, and so is who waits for it.
  void MarkStuck(std::int32_t stream, Position at);
  bool IsStuck(EventId event) const { return event_stuck_[event]; }
  Position StuckAt(EventId event) const { return event_stuck_at_[event]; }

 private:
  std::int32_t* Row(std::int32_t stream) { return &clocks_[stream * width()]; }
  const std::int32_t* Row(std::int32_t stream) const { return &clocks_[stream * width()]; }
  void Join(std::int32_t* into, const std::int32_t* from) const;

  std::int32_t host_ = 0;
  std::vector<std::int32_t> clocks_;        // (streams + host) rows of width()
  std::vector<std::int32_t> event_clocks_;  // a row per event: the clock at its latest record
  std::vector<char> recorded_;
  std::vector<char> stuck_, event_stuck_;
  std::vector<Position> stuck_at_, event_stuck_at_;
};

}  // namespace shardplan::verifier
