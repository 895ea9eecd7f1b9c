// SPDX-License-Identifier: Apache-2.0
// Pass `build_graph`: what has to come before what in a step of a plan (docs/internals/schedule-graph.md).
//
// [Note: every topological order is a correct program]
// A graph holds the triggers and instructions of one step. A topological order of it is a program: an
// instruction belongs to the trigger that comes last before it. Whatever order is taken, the plan verifies,
// each segment and each change of the modules' parameters happens at its own trigger, and every rank may take
// an order of its own. Steps are not mixed: everything of one step comes before everything of the next.
#pragma once

#include <boost/graph/compressed_sparse_row_graph.hpp>
#include <boost/range/iterator_range.hpp>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

// Why one instruction comes before another.
enum class EdgeKind : std::uint8_t {
  kData,    // the second reads what the first wrote, or is bound to it
  kMemory,  // lifetime of a buffer: allocated before it is used, used before it is overwritten or freed,
            // freed before it is allocated again
  kReuse,   // a block that the second gives back to its pool must not go to the first
  kStream,  // FIFO of one stream
  kEvent,   // recorded before waited for, waited for before recorded again
  kCommunicator,  // collectives of one communicator, in one order on every rank
  kHostWait,      // the second is issued after the host has waited, or worked itself
  kHost,          // the host's own program: triggers, segments, bindings, the user's calls
};
inline constexpr int kEdgeKinds = 8;
std::string_view Name(EdgeKind kind);

struct ScheduleNode {
  std::int32_t trigger = 0;
  std::int32_t instruction = -1;  // -1: the trigger itself
  bool is_fixed = false;          // stays at its trigger: part of the host's own program
};
struct ScheduleEdge {
  EdgeKind kind = EdgeKind::kHost;
};

// Vertices are in host order: triggers, each followed by its instructions. An edge leads to a later vertex.
// Vertex 0 is the step's first trigger, and everything comes after it. An edge takes five bytes: a plan of
// thousands of units has millions.
using ScheduleGraph = boost::compressed_sparse_row_graph<boost::directedS, ScheduleNode, ScheduleEdge,
                                                         boost::no_property, std::uint32_t, std::uint32_t>;

// A graph that is being made: such a graph takes all of its edges at once.
struct ScheduleGraphParts {
  std::vector<ScheduleNode> nodes;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ends;  // of each edge: from, to
  std::vector<ScheduleEdge> edges;

  void AddEdge(std::size_t from, std::size_t to, EdgeKind kind);
  // Edges of one vertex stay in the order in which they were added.
  ScheduleGraph Graph() const;
};

// A graph for each step of the plan, which refers to nothing that does not exist. Linear in the plan but for
// an optimizer step of all units, which comes after what each of them did.
std::vector<ScheduleGraph> BuildScheduleGraphs(const Plan& plan);

}  // namespace shardplan
