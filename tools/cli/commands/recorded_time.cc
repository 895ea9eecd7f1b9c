// SPDX-License-Identifier: Apache-2.0
#include "commands/recorded_time.h"

#include "cluster_names.h"
#include "flags/cluster_choice.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate_recording.h"
#include "support.h"

namespace shardplan::cli {

Result<RecordedTime> TimeOfRecording(const Recording& recording, const std::string& path,
                                     const std::string& cluster, std::int64_t tokens) {
  if (cluster.empty()) {
    return MakeError(ErrorCode::kUsage, "a recording has no cluster of its own: give --cluster, as h100_sxm");
  }
  Result<Cluster> named = FindCluster(cluster, recording.world_size);
  if (!named) return std::unexpected(std::move(named.error()));
  Result<Cluster> resized = WithRanks(std::move(*named), recording.world_size);
  if (!resized) {
    resized.error().file = cluster;
    return std::unexpected(std::move(resized.error()));
  }
  Result<RecordingSimulation> simulation =
      SimulateRecording(recording, *resized, {.tokens_per_step = tokens});
  if (!simulation) {
    if (simulation.error().file.empty()) simulation.error().file = path;
    return std::unexpected(std::move(simulation.error()));
  }
  return RecordedTime{std::move(*resized), std::move(*simulation)};
}

Status SimulateRecorded(const Recording& recording, const RecordedTimeArguments& arguments) {
  const Result<RecordedTime> time =
      TimeOfRecording(recording, arguments.path, arguments.cluster, arguments.tokens);
  if (!time) return std::unexpected(time.error());
  const RecordingSimulation& simulation = time->simulation;
  if (!arguments.report.empty()) {
    if (Status s = WriteAndSay(arguments.report, ToJson(simulation.report), arguments.quiet); !s) return s;
  }
  if (!arguments.kineto.empty()) {
    const std::string trace = KinetoTrace(recording, simulation, time->cluster);
    const std::string bytes = arguments.kineto.ends_with(".gz") ? Gzip(trace) : trace;
    if (Status s = WriteAndSay(arguments.kineto, bytes, arguments.quiet, "open it at ui.perfetto.dev"); !s)
      return s;
  }
  return arguments.prints ? PrintText(RecordedTimeText(simulation)) : Status{};
}

}  // namespace shardplan::cli
