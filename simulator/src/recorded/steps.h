// SPDX-License-Identifier: Apache-2.0
// The steps of a recording.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/recording.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// Events [begin, end) of one step, and the phase of each of them.
struct RecordedStep {
  std::int32_t number = 0;  // from 1; 0: the recording has no step that ended
  std::size_t begin = 0, end = 0;
  std::vector<Phase> phases;  // of the events from `begin` on
};

// The last step whose optimizer ended. All events where there is none.
RecordedStep LastStep(const Recording& recording);

}  // namespace shardplan::internal
