// SPDX-License-Identifier: Apache-2.0
// Tables about memory that `memory` and `explain-memory` print, and their JSON.
#pragma once

#include <string>
#include <string_view>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::cli {

// Bytes by category at the peak and between steps, where the peak is, and what lies outside of it: context,
// NCCL's buffers per communicator, parameters of no unit, and whether it fits (where a budget is known).
// `why`: WhyNoRanksFit.
std::string MemoryTable(const Plan& plan, const MemoryRows& rows, const DeferredGradients& deferred,
                        const DeviceFit& fit, std::string_view why);

// {"categories": [...], "peak": {...}, "rows": [{"event", "unit", "microbatch", "total_bytes",
// "by_category"}...]}
// `allocator`: with its statistics at each row; null: without.
std::string RowsJson(const Plan& plan, const MemoryRows& rows, const DeferredGradients& deferred,
                     const SteadyReserved* allocator);

// Reserved peak, fragmentation, and what other settings of the allocator would save. `fit` is of `reserved`;
// `at_once_bytes` is reserved with Completion::kAtOnce.
std::string ReservedTable(const Plan& plan, const ReservedMemory& reserved, const DeviceFit& fit,
                          Bytes at_once_bytes, const std::vector<SettingsTrial>& trials);

// The largest `count` of what is alive at the peak, and the units.
std::string ExplanationTable(const Plan& plan, const MemoryExplanation& explanation, std::size_t count);
std::string ExplanationJson(const Plan& plan, const MemoryExplanation& explanation);

}  // namespace shardplan::cli
