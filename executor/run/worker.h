// SPDX-License-Identifier: Apache-2.0
// One rank of a run.
#pragma once

#include "options.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "torch/launch.h"

namespace shardplan::run {

using executor::RankEnvironment;

// Replays the plan, once all ranks have found that they have the same; rank 0 prints the comparison to
// stdout. Everything that goes wrong comes back as an error. A rank whose plan is an error tells the others.
Status RunRank(const Result<Plan>& plan, const RunOptions& options, const RankEnvironment& environment);
// All ranks in this thread, on the virtual machine.
Status RunVirtual(const Plan& plan, const RunOptions& options);

}  // namespace shardplan::run
