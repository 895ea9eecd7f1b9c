// SPDX-License-Identifier: Apache-2.0
#include "tests/planner/random_orders.h"

#include <random>

#include "passes/linearise.h"

namespace shardplan::testing {
namespace {

// Lower comes earlier, where the graph allows it. Vertex 0 begins.
std::vector<std::uint64_t> Priorities(std::size_t count, std::mt19937& random, std::uint32_t how) {
  std::vector<std::uint64_t> priorities(count);
  for (std::size_t v = 0; v < count; ++v) {
    const std::uint64_t chance = random();
    switch (how) {
      case 0:  // evenly
        priorities[v] = 1 + chance;
        break;
      case 1:  // a little
        priorities[v] = 1 + v + chance % 20;
        break;
      case 2:  // backwards: the later half of everything as early as it can be
        priorities[v] = 1 + count - v;
        break;
      case 3:  // some as late as possible
        priorities[v] = 1 + v + (chance % 4 == 0 ? count : 0);
        break;
      default:  // some as early as possible
        priorities[v] = 1 + v + (chance % 4 == 0 ? 0 : count);
    }
  }
  if (count > 0) priorities[0] = 0;
  return priorities;
}

bool IsOfTheHost(const Instruction& i) {
  return i.kind == InstructionKind::kCompute || i.kind == InstructionKind::kBindUnsharded ||
         i.kind == InstructionKind::kBindSharded || i.kind == InstructionKind::kOptimizerStep ||
         i.kind == InstructionKind::kZeroGrad;
}

std::vector<Instruction> HostProgram(const Trigger& trigger) {
  std::vector<Instruction> program;
  for (const Instruction& i : trigger.instructions) {
    if (IsOfTheHost(i)) program.push_back(i);
  }
  return program;
}

}  // namespace

Plan Reordered(const Plan& plan, const std::vector<ScheduleGraph>& graphs, std::uint32_t seed) {
  std::mt19937 random(seed);
  Plan reordered = plan;
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const std::size_t count = boost::num_vertices(graphs[s]);
    const std::vector<std::int32_t> order = TopologicalOrder(graphs[s], Priorities(count, random, seed % 5));
    reordered.steps[s] = InOrder(plan.steps[s], graphs[s], order);
  }
  return reordered;
}

ScheduleGraphParts PartsOf(const ScheduleGraph& graph) {
  ScheduleGraphParts parts;
  for (std::size_t v = 0; v < boost::num_vertices(graph); ++v) parts.nodes.push_back(graph[v]);
  for (const auto edge : boost::make_iterator_range(boost::edges(graph))) {
    parts.AddEdge(boost::source(edge, graph), boost::target(edge, graph), graph[edge].kind);
  }
  return parts;
}

std::vector<ScheduleGraph> Without(EdgeKind kind, const std::vector<ScheduleGraph>& graphs) {
  std::vector<ScheduleGraph> without;
  for (const ScheduleGraph& graph : graphs) {
    const ScheduleGraphParts all = PartsOf(graph);
    ScheduleGraphParts copy{.nodes = all.nodes, .ends = {}, .edges = {}};
    for (std::size_t e = 0; e < all.edges.size(); ++e) {
      if (all.edges[e].kind != kind) copy.AddEdge(all.ends[e].first, all.ends[e].second, all.edges[e].kind);
    }
    without.push_back(copy.Graph());
  }
  return without;
}

bool KeepsTheHostProgram(const Plan& plan, const Plan& reordered) {
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const std::vector<Trigger>& given = plan.steps[s].triggers;
    const std::vector<Trigger>& other = reordered.steps[s].triggers;
    if (given.size() != other.size()) return false;
    for (std::size_t t = 0; t < given.size(); ++t) {
      if (given[t].kind != other[t].kind || given[t].unit != other[t].unit ||
          given[t].microbatch != other[t].microbatch || given[t].occurrence != other[t].occurrence ||
          HostProgram(given[t]) != HostProgram(other[t])) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace shardplan::testing
