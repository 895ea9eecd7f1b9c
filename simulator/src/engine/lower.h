// Lowering for those who need more of a plan's segments than their durations.
#pragma once

#include "memory/model_actions.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

// LowerPlan, and in the same pass over the segments what they do to memory.
Result<EngineProgram> LowerPlan(const Plan& plan, const Cluster& cluster, const CostModel& costs,
                                ModelActions& actions);

}  // namespace shardplan::internal
