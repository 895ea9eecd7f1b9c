// SPDX-License-Identifier: Apache-2.0
// The proof that nothing in a recording races (docs/internals/races.md).
//
// Happens-before is built from what the program orders, whatever the devices do: the order of each stream,
// events, the host's waits, and the rules of torch's allocator. Two accesses to the same byte, one of them a
// write, that it does not order are a race: in some schedule of the devices they come the other way round.
// One recording covers all schedules of the work that it has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/recording.h"

namespace shardplan {

enum class RaceKind : std::uint8_t {
  kUnordered,   // two accesses that nothing orders
  kReused,      // the first is of a block that was freed and handed out again: the second is its next owner's
  kFreedEarly,  // the same, but the second's block is another one: with other addresses it would be that one
  kHost,        // the host reads or writes pinned memory that a device writes or reads
};

struct RacingAccess {
  std::int64_t event = -1;  // index into Recording::events
  bool writes = false;
  MemoryRegion region;
};

struct Race {
  RaceKind kind = RaceKind::kUnordered;
  RacingAccess first, second;         // in the order of issue
  std::int64_t begin = 0, bytes = 0;  // of the stretch of memory where it was seen
  std::int64_t freed = -1;            // kReused, kFreedEarly: the event that frees the block
  std::int64_t allocated = -1;        // kReused, kFreedEarly: the event that hands the second's block out
};

struct RaceReport {
  std::vector<Race> races;
  std::int64_t accesses = 0;  // that were looked at
  std::vector<std::string>
      unknown_kernels;  // names of launches whose accesses are not known, sorted, each once
  std::int64_t unknown_launches = 0;
};

// Every pair of operators that race, once. The recording is one that ParseRecording has let through.
RaceReport FindRaces(const Recording& recording);

// Races of the same operators, lines and streams together, as text: what, where, and the edge that is
// missing. At most `shown` of them; 0: all.
std::string RaceText(const Recording& recording, const RaceReport& report, std::size_t shown);
// For each race that RaceText shows the schedule of the device in software that lets the second access come
// first: "late:5", the stream of the first does nothing before somebody waits for it. "": not known.
std::vector<std::string> RaceSchedules(const Recording& recording, const RaceReport& report);
// How many RaceText has.
std::size_t RaceGroups(const Recording& recording, const RaceReport& report);

}  // namespace shardplan
