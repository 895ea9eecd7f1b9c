// SPDX-License-Identifier: Apache-2.0
// Several ranks of a job, simulated together.
#pragma once

#include <cstdint>
#include <vector>

#include "recorded/lower_recording.h"
#include "recorded/meetings.h"
#include "shardplan/schemas/error.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

struct JoinedRank {
  EngineResult result;
  EngineTimeline timeline;
};

// kBadInput: a rank never ends; `pointer` is that of the event that waits for ever.
Result<std::vector<JoinedRank>> RunJoined(const std::vector<const Recording*>& recordings,
                                          const std::vector<LoweredRecording>& lowered,
                                          const std::vector<Meeting>& meetings);

}  // namespace shardplan::internal
