// SPDX-License-Identifier: Apache-2.0
// The report from what the engine and the memory profile found.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::internal {

// `result` is that of the last step, `synchronized` that of the same step with synchronize_phases.
Report BuildReport(const Plan& plan, const Cluster& cluster, const EngineProgram& program,
                   const EngineResult& result, const EngineResult& synchronized, const MemoryProfile& memory,
                   const MemoryProfile& host_memory, const DeviceFit& fit);

// The parts of a report that are the engine's alone: times of the step and its phases, overlap, activities.
void FillTimes(const EngineStep& step, const EngineResult& result, const EngineResult& synchronized,
               Report& report);
// The collectives of the step, sorted. name_of: a communicator's.
void FillCollectives(const EngineStep& step, const EngineResult& result,
                     const std::function<std::string(CommunicatorId)>& name_of, Report& report);
// The line that says so, of EngineProgram::dtypes_without_rate.
std::string WithoutRateText(const std::string& dtype);
// The time that matrix work takes at the peak rates of its dtypes. 0: the cluster has none.
Nanoseconds AtPeak(const std::map<DType, std::int64_t>& flops, const Cluster& cluster);

// FLOPs of one rank's step that the model needs: matrix work of forward and backward, what is computed a
// second time for activation checkpointing left out. `weighted_seconds_ppb` is the time that work takes at
// the peak rate of each dtype, in nanoseconds.
struct ModelFlops {
  std::int64_t flops = 0;
  std::int64_t peak_ns = 0;  // 0: the cluster has no peak rates
  std::int64_t recomputed_flops = 0;
};
ModelFlops CountModelFlops(const Plan& plan, const Cluster& cluster, const EngineProgram& program,
                           std::size_t step);

}  // namespace shardplan::internal
