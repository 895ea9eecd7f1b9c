// Pass `build_graph`: the schedule of the plan's steps as a graph. Nodes are the model's segments and the
// plan's instructions; an edge says why one comes before another.
#pragma once

#include <boost/graph/adjacency_list.hpp>
#include <cstdint>
#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

enum class EdgeKind : std::uint8_t {
  kData,         // the second reads what the first wrote
  kMemory,       // the second overwrites or frees what the first used, or uses what the first allocated
  kStreamOrder,  // FIFO of one stream, or a wait on a recorded event
  kHostOrder,    // issued one after the other at the same trigger chain
};

struct ScheduleNode {
  std::int32_t step = 0, trigger = 0, instruction = 0;
  bool is_segment = false;
};
struct ScheduleEdge {
  EdgeKind kind = EdgeKind::kHostOrder;
};

using ScheduleGraph =
    boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, ScheduleNode, ScheduleEdge>;

ScheduleGraph BuildScheduleGraph(const Plan& plan);

// The steady step of the graph as GraphViz text: a cluster per trigger, colours by stream, styles by kind of
// edge.
std::string WriteGraphviz(const ScheduleGraph& graph, const Plan& plan);

}  // namespace shardplan
