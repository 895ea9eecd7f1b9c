// SPDX-License-Identifier: Apache-2.0
// Pass `linearise`: an order of the instructions of every step that the schedule graph allows.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/schedule_graph.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// The topological order in which, of all vertices that may come next, the one with the lowest priority number
// comes (of equals the earlier vertex). `priorities`: by vertex; empty: the vertices' own order, which is the
// policy's.
std::vector<std::int32_t> TopologicalOrder(const ScheduleGraph& graph,
                                           const std::vector<std::uint64_t>& priorities = {});

// The step in another order: the instructions behind a trigger, up to the next, are that trigger's. `order`
// is a topological order of the step's graph.
PlanStep InOrder(const PlanStep& step, const ScheduleGraph& graph, const std::vector<std::int32_t>& order);

// The steps of the plan, each in the order of `graphs` that is the policy's as far as they allow it.
// kInternal: a graph has a cycle.
Result<std::vector<PlanStep>> Linearise(const Plan& plan, const std::vector<ScheduleGraph>& graphs);

}  // namespace shardplan
