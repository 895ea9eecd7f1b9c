// SPDX-License-Identifier: Apache-2.0
#include "passes/linearise.h"

#include <functional>
#include <queue>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/program.h"

namespace shardplan {

std::vector<std::int32_t> TopologicalOrder(const ScheduleGraph& graph,
                                           const std::vector<std::uint64_t>& priorities) {
  const std::size_t count = boost::num_vertices(graph);
  SHARDPLAN_ASSERT(priorities.empty() || priorities.size() == count, "a priority for each vertex");
  std::vector<std::int32_t> missing(count, 0);  // by vertex: what has to come before it and has not
  for (const auto edge : boost::make_iterator_range(boost::edges(graph))) {
    ++missing[boost::target(edge, graph)];
  }
  using Entry = std::pair<std::uint64_t, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  const auto push = [&](std::size_t v) { ready.emplace(priorities.empty() ? v : priorities[v], v); };
  for (std::size_t v = 0; v < count; ++v) {
    if (missing[v] == 0) push(v);
  }
  std::vector<std::int32_t> order;
  order.reserve(count);
  while (!ready.empty()) {
    const std::size_t vertex = ready.top().second;
    ready.pop();
    order.push_back(static_cast<std::int32_t>(vertex));
    for (const auto edge :
         boost::make_iterator_range(boost::out_edges(static_cast<std::uint32_t>(vertex), graph))) {
      if (--missing[boost::target(edge, graph)] == 0) push(boost::target(edge, graph));
    }
  }
  return order;
}

namespace {

// Whether all instructions of the trigger at order[at], and no others, come behind it as they were.
bool IsAsItWas(const PlanStep& step, const ScheduleGraph& graph, const std::vector<std::int32_t>& order,
               std::size_t at) {
  const std::int32_t trigger = graph[order[at]].trigger;
  const std::size_t count = step.triggers[trigger].instructions.size();
  if (at + count >= order.size()) return false;
  for (std::size_t k = 1; k <= count; ++k) {
    const ScheduleNode& node = graph[order[at + k]];
    if (node.trigger != trigger || node.instruction != static_cast<std::int32_t>(k - 1)) return false;
  }
  return at + count + 1 == order.size() || graph[order[at + count + 1]].instruction < 0;
}

}  // namespace

PlanStep InOrder(const PlanStep& step, const ScheduleGraph& graph, const std::vector<std::int32_t>& order) {
  PlanStep ordered{.name = step.name};
  ordered.triggers.reserve(step.triggers.size());
  for (std::size_t at = 0; at < order.size(); ++at) {
    const ScheduleNode& node = graph[order[at]];
    const Trigger& from = step.triggers[node.trigger];
    if (node.instruction < 0 && IsAsItWas(step, graph, order, at)) {
      ordered.triggers.push_back(from);
      at += from.instructions.size();
      continue;
    }
    if (node.instruction < 0) {
      ordered.triggers.push_back({.kind = from.kind,
                                  .unit = from.unit,
                                  .microbatch = from.microbatch,
                                  .occurrence = from.occurrence});
      ordered.triggers.back().instructions.Edit().reserve(from.instructions.size());
      continue;
    }
    SHARDPLAN_ASSERT(!ordered.triggers.empty(), "vertex 0 is a trigger, and comes before all others");
    Trigger& to = ordered.triggers.back();
    Instruction& moved = to.instructions.Edit().emplace_back(from.instructions[node.instruction]);
    if (moved.kind == InstructionKind::kCompute) {
      moved.microbatch_offset = MicrobatchOf(from, moved) - to.microbatch;
    }
  }
  return ordered;
}

Result<std::vector<PlanStep>> Linearise(const Plan& plan, const std::vector<ScheduleGraph>& graphs) {
  SHARDPLAN_ASSERT(graphs.size() == plan.steps.size(), "build_graph makes a graph for each step");
  std::vector<PlanStep> steps;
  steps.reserve(graphs.size());
  InstructionSharing sharing;
  for (std::size_t s = 0; s < graphs.size(); ++s) {
    const std::vector<std::int32_t> order = TopologicalOrder(graphs[s]);
    if (order.size() != boost::num_vertices(graphs[s])) {
      return std::unexpected(
          Error{.code = ErrorCode::kInternal, .message = "the schedule graph has a cycle"});
    }
    PlanStep& ordered = steps.emplace_back(InOrder(plan.steps[s], graphs[s], order));
    for (Trigger& trigger : ordered.triggers) sharing.Share(trigger);
  }
  return steps;
}

}  // namespace shardplan
