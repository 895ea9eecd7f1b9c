// SPDX-License-Identifier: Apache-2.0
// The passes behind single plans (MakePlan) and series of plans (PlanSeries).
#pragma once

#include <cstdint>
#include <string_view>

#include "planner_passes.h"
#include "shardplan/planner/planner.h"

namespace shardplan {

// Every pass runs here, is timed and reported. Ends behind the pass `last`; empty: behind the last one.
Status RunPasses(const Task& task, std::string_view last, const PlanOptions& options, Made& made);

// With what the strategy leaves to the trace: the PyTorch that a plan of it follows, the calls of a step, the
// mesh ([Note: the mesh of a trace]). kBadInput: a mesh has to be given.
Result<Strategy> CompleteStrategy(Strategy strategy, const Trace& trace, std::int64_t ranks);

// Checks a strategy by the document's own rules and the allocator's. kBadInput.
Status CheckKnobs(const Strategy& strategy);

}  // namespace shardplan
