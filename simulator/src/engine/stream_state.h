// SPDX-License-Identifier: Apache-2.0
// A stream while a step runs.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

__extension__ using Int128 = __int128;

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// A million (parts per million) times 60, which up to six sharers divide exactly.
inline constexpr std::int64_t kSharers = 60;
inline constexpr std::int64_t kFullRate = 1'000'000 * kSharers;

enum class StreamStatus : std::uint8_t {
  kReady,
  kActive,
  kJoining,  // at a collective that other ranks have not come to
  kDone,
};

struct StreamState {
  std::int32_t head = -1;  // instruction that is next or running
  StreamStatus status = StreamStatus::kReady;
  WorkClass work = WorkClass::kCompute;
  std::int8_t loads = -1;
  std::int32_t passed = -1;       // instruction that was passed last
  std::int64_t wake_ns = kNever;  // the head cannot start before the host has issued it
  std::int64_t stalled_ns = -1;   // since when the head, a wait, has been waiting
  bool joined = false;            // at a collective of several ranks, whose end `Joins` says
  std::int64_t rate = 0;
  std::int64_t updated_ns = 0;  // `remaining` is as of then
  std::int64_t finish_ns = kNever;
  Int128 remaining = 0;            // rate x nanoseconds
  std::int32_t next_operator = 0;  // of a segment
  std::int64_t started_ns = 0;
  std::int32_t span = -1;
  std::int32_t last_span = -1;
  std::vector<std::int32_t> arrivals;  // spans whose records the next span of this stream waited for
};

}  // namespace shardplan::internal
