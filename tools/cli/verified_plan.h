// Plans that a command is about to use, not only to look at: verified first.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

// --no-verify
void AddNoVerifyFlag(CLI::App& command, bool& no_verify);

// kNegative for a plan that does not verify. What it does wrong because PyTorch does is a warning on stderr,
// as is `no_verify`, which lets everything pass.
Status VerifyForUse(const std::string& path, const Plan& plan, bool no_verify);

// ReadPlan, then VerifyForUse.
Result<Plan> ReadVerifiedPlan(const std::string& path, bool no_verify);

}  // namespace shardplan::cli
