// SPDX-License-Identifier: Apache-2.0
// A page about a plan's memory over the steady step: stacked by category, and addresses over time.
#pragma once

#include <string>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan {

// A self-contained HTML page (no external scripts). Hovering names the unit and the buffer. The horizontal
// axis is the host's order: one step right for every allocation and free. With `reserved` (recorded with
// addresses) it has the map of addresses too; null: without.
std::string MemoryHtml(const Plan& plan, const MemoryHistory& history,
                       const ReservedMemory* reserved = nullptr);

}  // namespace shardplan
