// Pass `linearise`: puts the instructions of every step in an order that the schedule graph allows.
#pragma once

#include "passes/schedule_graph.h"

namespace shardplan {

// Host order is part of the graph of a policy that says in which order things are issued, so the order is the
// policy's own. kInternal if the graph has a cycle.
Status Linearise(const ScheduleGraph& graph, Plan& plan);

}  // namespace shardplan
