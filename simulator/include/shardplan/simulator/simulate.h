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
#include "shardplan/schemas/reshard.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

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
  // In a segment with collectives of the model: the first entry of the part that runs, or the collective.
  std::int32_t entry = -1;
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

// The bytes that a device needs: reserved memory, context, NCCL's buffers, parameters in no unit.
Bytes NeededBytes(const MemoryReport& memory);

// A table for people: one column per report (step time, exposed communication, overlap, tokens/s, memory).
std::string ComparisonTable(const std::vector<Report>& reports);

// A self-contained HTML page (no external scripts): summary, timeline, memory by category, tables.
std::string ReportHtml(const std::vector<const Plan*>& plans,
                       const std::vector<const Simulation*>& simulations);

// How far a step time may be off, and which of the cluster's figures that is from.

// The cluster on which everything that follows from one figure takes `factor_ppm` of its time: durations are
// multiplied, rates divided. A slowdown's lost part is multiplied.
Cluster WithFigure(Cluster cluster, ClusterFigure figure, std::int64_t factor_ppm);

struct FigureEffect {
  FigureSource source;
  // The step when the figure is better, and when it is worse, by what it may be off: divided and multiplied
  // by 1 + off.
  Nanoseconds better_ns, worse_ns;
};

struct Sensitivity {
  Nanoseconds step_ns;
  // Figures are off independently of each other: the squares of what they change are added on either side.
  Nanoseconds low_ns, high_ns;
  std::vector<FigureEffect> effects;  // the widest first
};

// Sensitivities of the steady step to the figures of `cluster.sources`. Errors as Simulate.
Result<Sensitivity> AnalyseSensitivity(const Plan& plan, const Cluster& cluster);

// The step's interval and the figures' effects, in its report.
void FillInterval(const Sensitivity& sensitivity, Report& report);

// "step 812.4 ms, 770.1 to 861.3 ms two times in three, most of it from network (guess, 20 %)". Empty without
// sources.
std::string IntervalText(const Sensitivity& sensitivity);

// A line for each figure, with a bar from better to worse (a tornado).
std::string SensitivityText(const Sensitivity& sensitivity);

// The time and memory of a resharding plan on a cluster (docs/reference/reshard-format.md, "Simulation").

struct ReshardSimulation {
  std::int64_t rounds = 0;
  std::int64_t copies = 0;  // executed, as pieces
  Bytes local_bytes;        // stay on their rank
  Bytes node_bytes;         // cross a link inside a node
  Bytes network_bytes;      // ... between nodes
  Bytes most_sent_bytes;    // by one rank
  Bytes most_received_bytes;
  Bytes staging_peak_bytes;  // of one rank in one round
  // Memory of one rank: its storage in both layouts, and its staging buffers.
  Bytes memory_peak_bytes;
  Nanoseconds duration_ns;
  // The rank that has most to send or receive, without rounds and latency: no order is faster.
  Nanoseconds bound_ns;
};

// The plan has to verify. kBadInput: the cluster has no links.
Result<ReshardSimulation> SimulateReshard(const ReshardPlan& plan, const Cluster& cluster);

// Lines for a person.
std::string ReshardSimulationText(const ReshardSimulation& simulation);

}  // namespace shardplan
