// SPDX-License-Identifier: Apache-2.0
// `simulate` of a recording: the time of its last whole step on a cluster.
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"

namespace shardplan::cli {

struct RecordedTimeArguments {
  std::string path;     // of the recording, for errors
  std::string cluster;  // a file, a shipped one, or a device
  std::int64_t tokens = 0;
  std::string report, kineto;  // files; "": none
  bool quiet = false;
  bool prints = true;
};

// kUsage: no cluster is named.
Status SimulateRecorded(const Recording& recording, const RecordedTimeArguments& arguments);

}  // namespace shardplan::cli
