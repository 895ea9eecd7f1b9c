// SPDX-License-Identifier: Apache-2.0
// Plans that a command is about to use, not only to look at: verified first, on the cluster that is named.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <variant>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/recording.h"

namespace shardplan::cli {

// --no-verify
void AddNoVerifyFlag(CLI::App& command, bool& no_verify);

// kNegative for a plan that does not verify. A violation that PyTorch has, too, is a warning on stderr, as is
// `no_verify`, which lets everything pass.
Status VerifyForUse(const std::string& path, const Plan& plan, bool no_verify);

// The same of a plan that may be a recording, which needs no verifier.
Result<std::variant<Plan, Recording>> ReadVerifiedPlanOrRecording(const std::string& path, bool no_verify);

// ReadPlan, then VerifyForUse.
Result<Plan> ReadVerifiedPlan(const std::string& path, bool no_verify);

// The cluster that is named (a file, a shipped one, or a device) with as many of its devices as the plan has
// ranks; a line of progress says so where it has others. Errors as FindCluster and WithRanks.
Result<Cluster> ClusterForPlan(const std::string& named, const std::string& plan_path, const Plan& plan,
                               bool quiet);

}  // namespace shardplan::cli
