// SPDX-License-Identifier: Apache-2.0
// `shardplan run` of a plan of resharding.
#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"
#include "torch/launch.h"

namespace shardplan::run {

using executor::RankEnvironment;

// Whether a document that is no plan of training is one of resharding, by the error of reading it as one.
bool IsReshardInstead(const Error& error);

// The plan of the options, verified unless our launcher has done so or `options.verify` is false; kUsage:
// options that mean nothing here.
Result<ReshardPlan> ReadReshardForRun(const RunOptions& options, bool is_verified);

// One rank: storages are made and filled, the plan is executed, every byte of the target is compared. Rank 0
// prints what was moved.
Status RunReshardRank(const Result<ReshardPlan>& plan, const RunOptions& options,
                      const RankEnvironment& environment);

}  // namespace shardplan::run
