// SPDX-License-Identifier: Apache-2.0
// The memory that is alive at a plan's peak: lifetimes, units, and the knob that would remove each
// (docs/reference/memory.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan {

// Blocks of one unit and category that are alive at the peak; those of different buffers apart.
struct AliveMemory {
  std::string category;
  UnitId unit = -1;
  std::string name;  // of the buffer; of the model's own the operator of the largest, "aten.mm and 11 more"
  Bytes bytes;       // rounded, as the profile counts
  std::int32_t blocks = 0;
  MemoryPoint since;    // the first birth among them
  MemoryPoint until;    // the last free; step -1: never
  std::string knob;     // what would take it away, for people; "" when none does
  Bytes knob_bytes;     // how much of it at this point, from a formula
  bool in_use = false;  // the segment that runs at the peak needs it
  bool operator==(const AliveMemory&) const = default;
};

struct UnitMemory {
  UnitId unit = -1;  // -1: of no unit
  Bytes at_peak_bytes;
  Bytes highest_bytes;  // the most that the unit has at any time of the steady step
  MemoryPoint highest_at;
};

struct MemoryExplanation {
  Bytes peak_bytes;
  MemoryPoint peak_at;
  std::int32_t peak_action = -1;   // index in the history
  std::string peak_text;           // "backward layers.30, after pre_backward layers.30"
  std::string allocation;          // what was allocated last
  std::vector<AliveMemory> alive;  // largest first
  std::vector<UnitMemory> units;   // like Plan::units, then of no unit
};

// Explains the peak of the steady step. `history` is MemoryHistoryOf(plan).
MemoryExplanation ExplainMemory(const Plan& plan, const MemoryHistory& history,
                                Bytes granularity_bytes = {512});

// A page about a plan's memory over the steady step: stacked by category, and addresses over time.

// A self-contained HTML page (no external scripts). Hovering names the unit and the buffer. The horizontal
// axis is the host's order: one step right for every allocation and free. With `reserved` (recorded with
// addresses) it has the map of addresses too; null: without.
std::string MemoryHtml(const Plan& plan, const MemoryHistory& history,
                       const ReservedMemory* reserved = nullptr);

}  // namespace shardplan
