// SPDX-License-Identifier: Apache-2.0
#include "commands/recorded_time.h"

#include "cluster_names.h"
#include "flags/cluster_choice.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate_recording.h"
#include "support.h"

namespace shardplan::cli {

Result<RecordedTime> TimeOfRecordings(const std::vector<const Recording*>& recordings,
                                      const std::vector<std::string>& paths, const std::string& cluster,
                                      std::int64_t tokens) {
  if (cluster.empty()) {
    return MakeError(ErrorCode::kUsage, "a recording has no cluster of its own: give --cluster, as h100_sxm");
  }
  const std::int64_t ranks = recordings.front()->world_size;
  Result<Cluster> named = FindCluster(cluster, ranks);
  if (!named) return std::unexpected(std::move(named.error()));
  Result<Cluster> resized = WithRanks(std::move(*named), ranks);
  if (!resized) {
    resized.error().file = cluster;
    return std::unexpected(std::move(resized.error()));
  }
  Result<std::vector<RecordingSimulation>> simulations =
      SimulateRecordings(recordings, *resized, {.tokens_per_step = tokens});
  if (!simulations) {
    if (paths.size() == 1 && simulations.error().file.empty()) simulations.error().file = paths.front();
    return std::unexpected(std::move(simulations.error()));
  }
  return RecordedTime{std::move(*resized), std::move(*simulations)};
}

Status SimulateRecorded(const std::vector<const Recording*>& recordings,
                        const RecordedTimeArguments& arguments) {
  const Result<RecordedTime> time =
      TimeOfRecordings(recordings, arguments.paths, arguments.cluster, arguments.tokens);
  if (!time) return std::unexpected(time.error());
  const std::vector<RecordingSimulation>& simulations = time->simulations;
  if (!arguments.report.empty()) {
    const std::string report = ToJson(simulations.front().report);
    if (Status s = WriteAndSay(arguments.report, report, arguments.quiet); !s) return s;
  }
  for (const std::string& path : arguments.kineto) {
    const std::string trace = KinetoTrace(recordings, simulations, time->cluster);
    const std::string bytes = path.ends_with(".gz") ? Gzip(trace) : trace;
    if (Status s = WriteAndSay(path, bytes, arguments.quiet, "open it at ui.perfetto.dev"); !s) return s;
  }
  if (!arguments.html.empty()) {
    if (Status s = WriteAndSay(arguments.html, RecordedHtml(recordings, simulations), arguments.quiet); !s)
      return s;
  }
  return arguments.prints ? PrintText(RecordedTimeText(simulations)) : Status{};
}

}  // namespace shardplan::cli
