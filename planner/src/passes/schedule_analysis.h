// SPDX-License-Identifier: Apache-2.0
// Questions to a schedule graph of a step: which edges are needed, what may move where, what holds up
// everything, how long the step takes at least. Built on Boost.Graph.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "passes/schedule_graph.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// The fewest edges with the same paths; between two vertices the first kind of edge is kept. Takes time and
// memory of the square of the vertices: for pictures and explanations, not for planning.
ScheduleGraph TransitiveReduction(const ScheduleGraph& graph);

// The triggers between which a vertex may move, both included, whatever the rest does.
struct TriggerRange {
  std::int32_t first = 0;
  std::int32_t last = 0;
  bool operator==(const TriggerRange&) const = default;
};
std::vector<TriggerRange> MovableRanges(const ScheduleGraph& graph);

// The vertices in `among` that each other one is ordered with, in order. All that comes later has to pass
// through them: they dominate the end of the step. None of `among` can move across one. Cost as above.
std::vector<std::int32_t> Barriers(const ScheduleGraph& graph, const std::vector<bool>& among);

// A longest path by the vertices' durations: with these, no order of the instructions takes less.
struct LongestPath {
  Nanoseconds length_ns;
  std::vector<std::int32_t> vertices;
};
LongestPath FindLongestPath(const ScheduleGraph& graph,
                            const std::function<Nanoseconds(const ScheduleNode&)>& duration_ns);

// The step as GraphViz text, without edges that follow from others: triggers, segments as boxes, instructions
// coloured by stream; the style of an edge is its kind.
std::string WriteGraphviz(const ScheduleGraph& graph, const Plan& plan, const PlanStep& step);

}  // namespace shardplan
