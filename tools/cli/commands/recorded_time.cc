// SPDX-License-Identifier: Apache-2.0
#include "commands/recorded_time.h"

#include "cluster_names.h"
#include "flags/cluster_choice.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate_recording.h"
#include "support.h"

namespace shardplan::cli {

Status SimulateRecorded(const Recording& recording, const RecordedTimeArguments& arguments) {
  if (arguments.cluster.empty()) {
    return MakeError(ErrorCode::kUsage, "a recording has no cluster of its own: give --cluster, as h100_sxm");
  }
  Result<Cluster> named = FindCluster(arguments.cluster);
  if (!named) return std::unexpected(std::move(named.error()));
  Result<Cluster> cluster = WithRanks(std::move(*named), recording.world_size);
  if (!cluster) return std::unexpected(std::move(cluster.error()));
  Result<RecordingSimulation> simulation =
      SimulateRecording(recording, *cluster, {.tokens_per_step = arguments.tokens});
  if (!simulation) {
    if (simulation.error().file.empty()) simulation.error().file = arguments.path;
    return std::unexpected(std::move(simulation.error()));
  }
  if (!arguments.report.empty()) {
    if (Status s = WriteAndSay(arguments.report, ToJson(simulation->report), arguments.quiet); !s) return s;
  }
  if (!arguments.kineto.empty()) {
    const std::string trace = KinetoTrace(recording, *simulation, *cluster);
    const std::string bytes = arguments.kineto.ends_with(".gz") ? Gzip(trace) : trace;
    if (Status s = WriteAndSay(arguments.kineto, bytes, arguments.quiet, "open it at ui.perfetto.dev"); !s)
      return s;
  }
  return arguments.prints ? PrintText(RecordedTimeText(*simulation)) : Status{};
}

}  // namespace shardplan::cli
