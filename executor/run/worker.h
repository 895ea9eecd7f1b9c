// One rank of a run.
#pragma once

#include "options.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::run {

// Replays the plan; rank 0 prints the comparison to stdout. Everything that goes wrong comes back as an
// error.
Status RunRank(const Plan& plan, const RunOptions& options, const RankEnvironment& environment);
// All ranks in this thread, on the virtual machine.
Status RunVirtual(const Plan& plan, const RunOptions& options);

}  // namespace shardplan::run
