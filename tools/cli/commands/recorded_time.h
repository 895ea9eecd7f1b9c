// SPDX-License-Identifier: Apache-2.0
// `simulate` of a recording: the time of its last whole step on a cluster.
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/simulator/simulate_recording.h"

namespace shardplan::cli {

struct RecordedTimeArguments {
  std::string path;     // of the recording, for errors
  std::string cluster;  // a file, a shipped one, or a device
  std::int64_t tokens = 0;
  std::string report, kineto;  // files; "": none
  bool quiet = false;
  bool prints = true;
};

// The report of its time on the cluster with as many ranks as the job. kUsage: no cluster is named.
struct RecordedTime {
  Cluster cluster;
  RecordingSimulation simulation;
};
Result<RecordedTime> TimeOfRecording(const Recording& recording, const std::string& path,
                                     const std::string& cluster, std::int64_t tokens);

// The same, written and printed.
Status SimulateRecorded(const Recording& recording, const RecordedTimeArguments& arguments);

}  // namespace shardplan::cli
