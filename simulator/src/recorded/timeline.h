// SPDX-License-Identifier: Apache-2.0
// The streams of a simulated rank, for a picture.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/simulate_recording.h"

namespace shardplan::internal {

// "aten::mm layers.3.mlp", "all_gather dp_shard, 218.1 MB", "send pp to rank 8, 33.6 MB".
std::string RecordedName(const Recording& recording, std::int64_t event);

// prefix: of the streams' names.
std::vector<TimelineSpan> RecordedTimeline(const Recording& recording, const RecordingSimulation& simulation,
                                           const std::string& prefix);

}  // namespace shardplan::internal
