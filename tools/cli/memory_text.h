// Tables about memory that `memory` and `explain-memory` print, and their JSON.
#pragma once

#include <string>

#include "memory_input.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_rows.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::cli {

// Bytes by category at the peak and between steps, where the peak is, and what lies outside of it: context,
// NCCL's buffers per communicator, parameters of no unit, and whether it fits the device (when the plan's
// cluster says how much it has).
std::string MemoryTable(const PlanAndUnmanaged& input, const MemoryRows& rows,
                        const ReservedMemory* reserved);
// Whether the peak (reserved when known) and what lies outside of it fit the device; true when its size is
// unknown.
bool FitsDevice(const PlanAndUnmanaged& input, const MemoryRows& rows, const ReservedMemory* reserved);

// {"categories": [...], "peak": {...}, "rows": [{"event", "unit", "microbatch", "total_bytes",
// "by_category"}...]}
// `allocator`: with its statistics at each row; null: without.
std::string RowsJson(const Plan& plan, const MemoryRows& rows, const SteadyReserved* allocator);

// Reserved peaks under other circumstances.
struct OtherReserved {
  Bytes without_limit_bytes;  // on a device without end, printed where the memory does not suffice
  Bytes at_once_bytes;        // Completion::kAtOnce
};

// Reserved peak, fragmentation, and what other settings of the allocator would save.
std::string ReservedTable(const Plan& plan, const ReservedMemory& reserved, const OtherReserved& other,
                          const std::vector<SettingsTrial>& trials);

// The largest `count` of what is alive at the peak, and the units.
std::string ExplanationTable(const Plan& plan, const MemoryExplanation& explanation, std::size_t count);
std::string ExplanationJson(const Plan& plan, const MemoryExplanation& explanation);

}  // namespace shardplan::cli
