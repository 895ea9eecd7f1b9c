// SPDX-License-Identifier: Apache-2.0
// Plans in other orders that their schedule graphs allow.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "passes/schedule_graph.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::testing {

// The plan with every step in a random topological order of its graph: by the seed, instructions are drawn
// evenly, moved a little, as early as possible, as late as possible, or a few of them far.
Plan Reordered(const Plan& plan, const std::vector<ScheduleGraph>& graphs, std::uint32_t seed);

// The parts of the graph, to make another.
ScheduleGraphParts PartsOf(const ScheduleGraph& graph);

// The graphs without the edges of one kind.
std::vector<ScheduleGraph> Without(EdgeKind kind, const std::vector<ScheduleGraph>& graphs);

// Whether each segment, binding and call of the user is at the same trigger in both plans, in the same order,
// and every step has the same triggers.
bool KeepsTheHostProgram(const Plan& plan, const Plan& reordered);

}  // namespace shardplan::testing
