// SPDX-License-Identifier: Apache-2.0
// A recorded step as the engine's arrays.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "recorded/steps.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// A collective, or one message of a group of them (lower_recording.cc, [Note: messages of one group]).
struct CollectivePart {
  std::int32_t instruction = -1;
  std::int64_t event = -1;  // index into Recording::events
  Nanoseconds duration_ns;  // alone
};

struct LoweredRecording {
  EngineProgram program;              // one step
  std::vector<std::int64_t> events;   // of each instruction: index into Recording::events
  std::vector<CollectivePart> parts;  // in host order
  std::vector<RecordedId> streams;    // the recording's, by the engine's number; the first computes most
  // Matrix work that is no recomputation, and recomputation.
  std::map<DType, std::int64_t> flops, recomputed_flops;
  std::vector<OperatorReport> operators;  // busy_ns: each alone
  std::int64_t tokens = 0;                // that the step's embeddings look up
};

Result<LoweredRecording> LowerRecording(const Recording& recording, const RecordedStep& step,
                                        const Cluster& cluster, const CostModel& costs);

}  // namespace shardplan::internal
