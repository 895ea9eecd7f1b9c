// SPDX-License-Identifier: Apache-2.0
// `simulate` of a recording: the time of its last whole step on a cluster. Several are joined.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/simulator/simulate_recording.h"

namespace shardplan::cli {

struct RecordedTimeArguments {
  std::vector<std::string> paths;  // of the recordings, for errors
  std::string cluster;             // a file, a shipped one, or a device
  std::int64_t tokens = 0;
  std::string report, html;         // files; "": none
  std::vector<std::string> kineto;  // files, each the same
  bool quiet = false;
  bool prints = true;
};

// The time of ranks of one job on the cluster with as many ranks as that. kUsage: no cluster is named.
struct RecordedTime {
  Cluster cluster;
  std::vector<RecordingSimulation> simulations;  // of each recording
};
Result<RecordedTime> TimeOfRecordings(const std::vector<const Recording*>& recordings,
                                      const std::vector<std::string>& paths, const std::string& cluster,
                                      std::int64_t tokens);

// The same, written and printed.
Status SimulateRecorded(const std::vector<const Recording*>& recordings,
                        const RecordedTimeArguments& arguments);

}  // namespace shardplan::cli
