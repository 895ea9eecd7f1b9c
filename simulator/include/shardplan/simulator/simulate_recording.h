// SPDX-License-Identifier: Apache-2.0
// The time of a recorded step on a cluster: the engine runs what a rank issued (docs/internals/simulator.md,
// "Recordings").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/report.h"

namespace shardplan {

struct RecordingOptions {
  // Tokens of one step of the whole job; 0: the indices that the step's embedding looks up, times the ranks
  // that have a batch of their own.
  std::int64_t tokens_per_step = 0;
};

// One event that ran: on the host (stream = -1) or on a stream of the recording.
struct RecordedSpan {
  RecordedId stream = -1;
  std::int64_t event = -1;  // index into Recording::events
  Nanoseconds start_ns;
  Nanoseconds end_ns;
  Nanoseconds issued_ns;  // of a span on a stream: when the host had issued it
  bool operator==(const RecordedSpan&) const = default;
};

struct RecordingSimulation {
  Report report;
  std::int32_t step = 0;  // which was simulated: the last whole one; 0: all, where no step ended
  std::vector<RecordedSpan> spans;
  // Figures of the cluster that were measured with another minor release of torch than the job's, as a line;
  // "": none is known.
  std::string other_releases;
};

// The last whole step of the recording from an idle machine: kernels by the cost model, collectives by group
// and link, the host's time as the cluster says. The other ranks do the same. kBadInput: the cluster lacks
// links or costs, has fewer ranks than the job, or the step uses more than 100 streams.
Result<RecordingSimulation> SimulateRecording(const Recording& recording, const Cluster& cluster,
                                              const RecordingOptions& options = {});

// That step as torch.profiler writes a profile (Kineto's JSON): Perfetto opens it.
std::string KinetoTrace(const Recording& recording, const RecordingSimulation& simulation,
                        const Cluster& cluster);

// A table for people.
std::string RecordedTimeText(const RecordingSimulation& simulation);

}  // namespace shardplan
