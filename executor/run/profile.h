// SPDX-License-Identifier: Apache-2.0
// `shardplan run --profile`: what the ranks recorded becomes a report.
#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "shardplan/executor/step_recorder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::run {

// kUsage: the options leave nothing to record. `plan` is null for a plan of resharding.
Status CheckProfile(const RunOptions& options, const Plan* plan);

// Records `options.steps` steps: the first one makes connections, the others are recorded in turns.
executor::RecorderOptions RecorderOptionsOf(const RunOptions& options);

// Has `shardplan import-profile`, which lies beside this program, write the report of the first rank. Its
// words are on standard error where it fails.
Status WriteProfile(const RunOptions& options, const std::vector<std::string>& recordings);

}  // namespace shardplan::run
