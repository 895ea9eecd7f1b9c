// SPDX-License-Identifier: Apache-2.0
// Simulation of a plan: time, overlap and memory of a representative rank (docs/internals/simulator.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/device_fit.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {

struct SimulationOptions {
  // Caching allocator's rounding (torch.cuda: 512).
  Bytes granularity_bytes{512};
  // Keep spans and memory samples (off: only the report).
  bool record_timeline = true;
  // How it is asked whether the plan fits.
  FitOptions fit;
  // Report::plan_digest, "sha256:..." of the plan's document; left empty when the caller does not know it.
  std::string plan_digest;
};

// One thing that ran: on the host (stream = -1) or on a stream.
struct Span {
  StreamId stream = -1;
  std::int32_t step = 0;          // index into Plan::steps; the steady step is simulated last
  std::int32_t trigger = -1;      // index in the step
  std::int32_t instruction = -1;  // index in the trigger; -1: the trigger itself
  Nanoseconds start_ns;
  Nanoseconds end_ns;
  bool operator==(const Span&) const = default;
};

// A wait of `waiter` (span index) on what `recorded` (span index) had recorded.
struct Flow {
  std::int32_t recorded = -1;
  std::int32_t waiter = -1;
  bool operator==(const Flow&) const = default;
};

struct Simulation {
  Report report;  // of the steady step
  std::vector<Span> spans;
  std::vector<Flow> flows;
  std::vector<std::string> categories;
  std::vector<MemorySample> memory;
  std::vector<MemorySample> host_memory;
  std::int64_t instructions = 0;  // simulated
};

// Runs every step once in order; the report is of the last one, the steady step. Deterministic. A step begins
// when everything of the one before is done on host and device, as in a loop that reads its loss every step.
// On another cluster: with that as plan.cluster, from which times come and what its device's libraries take.
// kBadInput: the plan refers to costs that the cluster lacks; kNegative: a wait can never finish. Errors of
// FitDevice.
Result<Simulation> Simulate(const Plan& plan, const SimulationOptions& options = {});

// Chrome trace event JSON that Perfetto opens: a track per stream and the host, flows from records to waits,
// a counter track of memory by category. Times in microseconds with three decimals.
std::string TimelineJson(const Plan& plan, const Simulation& simulation);

// The last step, the steady one, as torch.profiler writes a profile of rank 0 (Kineto's JSON): operators of
// the host with their launches, kernels by stream, collectives with NCCL's arguments, ranges with FSDP2's
// names (plan_ranges.h), memory, one ProfilerStep. Perfetto, HTA and `import-profile` read it. `cluster` is
// the one that was simulated. Kernels of a segment follow one another as its operators' costs say; what
// slowed them is spread evenly over it.
std::string KinetoTrace(const Plan& plan, const Simulation& simulation, const Cluster& cluster);

// Of a device: what is reserved, context, NCCL's buffers, parameters in no unit.
Bytes NeededBytes(const MemoryReport& memory);

// A table for people: one column per report (step time, exposed communication, overlap, tokens/s, memory).
std::string ComparisonTable(const std::vector<Report>& reports);

// A self-contained HTML page (no external scripts): summary, timeline, memory by category, tables.
std::string ReportHtml(const std::vector<const Plan*>& plans,
                       const std::vector<const Simulation*>& simulations);

}  // namespace shardplan
