// SPDX-License-Identifier: Apache-2.0
// The time of a recorded step on a cluster: the engine runs what a rank issued (docs/reference/rehearse.md,
// "The time of a step").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/engine.h"

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
  Nanoseconds issued_ns;                            // of a span on a stream: when the host had issued it
  DeviceActivity activity = DeviceActivity::kIdle;  // of a span on a stream
  bool operator==(const RecordedSpan&) const = default;
};

struct RecordingSimulation {
  Report report;          // step_ns, tokens/s and utilization are the job's, everything else is the rank's
  std::int64_t rank = 0;  // whose recording it is
  Nanoseconds end_ns;     // when this rank is done
  std::int32_t step = 0;  // which was simulated: the last whole one; 0: all, where no step ended
  std::vector<RecordedSpan> spans;
  // Lines for people. They name figures of the cluster that were measured with another minor release of torch
  // than the job's, ranks that are waited for and not there, and dtypes without a rate.
  std::vector<std::string> remarks;
};

// The last whole step of the recording from an idle machine: kernels by the cost model, collectives by group
// and link, the host's time as the cluster says. The other ranks do the same. kBadInput: the cluster lacks
// links or costs, has fewer ranks than the job, or the step uses more than 100 streams.
Result<RecordingSimulation> SimulateRecording(const Recording& recording, const Cluster& cluster,
                                              const RecordingOptions& options = {});

// Ranks that do different things, the stages of a pipeline, each waiting for the messages of the others
// (simulator/src/recorded/meetings.h has the rules). The first is the one that was asked for. One result for
// each. kBadInput, too: recordings that are not of one job, a rank that is missing, and messages and
// collectives that do not match.
Result<std::vector<RecordingSimulation>> SimulateRecordings(const std::vector<const Recording*>& recordings,
                                                            const Cluster& cluster,
                                                            const RecordingOptions& options = {});

// That step as torch.profiler writes a profile (Kineto's JSON): Perfetto opens it. Several ranks: each with
// its device and its threads. There is a simulation for each recording.
std::string KinetoTrace(const std::vector<const Recording*>& recordings,
                        const std::vector<RecordingSimulation>& simulations, const Cluster& cluster);

// That step as a page: the ranks beside each other, and the streams of all of them on one timeline. There is
// a simulation for each recording.
std::string RecordedHtml(const std::vector<const Recording*>& recordings,
                         const std::vector<RecordingSimulation>& simulations);

// A table for people, of the first; a line for each where there are several.
std::string RecordedTimeText(const std::vector<RecordingSimulation>& simulations);

}  // namespace shardplan
