#include "passes/linearise.h"

#include <functional>
#include <queue>
#include <vector>

namespace shardplan {

Status Linearise(const ScheduleGraph& graph, Plan& plan) {
  // Kahn's algorithm; among the instructions that are free to go the earliest issued one goes first, so that
  // the result is one and the same for every run.
  const std::size_t count = boost::num_vertices(graph);
  std::vector<std::int32_t> missing(count, 0);
  for (std::size_t v = 0; v < count; ++v) {
    for (const auto edge : boost::make_iterator_range(boost::out_edges(v, graph))) {
      ++missing[boost::target(edge, graph)];
    }
  }
  std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready;
  for (std::size_t v = 0; v < count; ++v) {
    if (missing[v] == 0) ready.push(v);
  }
  std::vector<PlanStep> steps = plan.steps;
  for (PlanStep& step : steps) {
    for (Trigger& trigger : step.triggers) trigger.instructions.clear();
  }
  std::size_t placed = 0;
  while (!ready.empty()) {
    const std::size_t vertex = ready.top();
    ready.pop();
    ++placed;
    const ScheduleNode& node = graph[vertex];
    Instruction& instruction = plan.steps[node.step].triggers[node.trigger].instructions[node.instruction];
    steps[node.step].triggers[node.trigger].instructions.push_back(std::move(instruction));
    for (const auto edge : boost::make_iterator_range(boost::out_edges(vertex, graph))) {
      if (--missing[boost::target(edge, graph)] == 0) ready.push(boost::target(edge, graph));
    }
  }
  if (placed != count) {
    return std::unexpected(Error{.code = ErrorCode::kInternal, .message = "the schedule graph has a cycle"});
  }
  plan.steps = std::move(steps);
  return {};
}

}  // namespace shardplan
