// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "passes/schedule_analysis.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

// The step of the plan, its graph, and words for both.
class ScheduleExplainer {
 public:
  ScheduleExplainer(const Plan& plan, const PlanStep& step, const ScheduleGraph& graph)
      : plan_(plan), step_(step), graph_(graph) {}

  std::string Edges() const {
    std::array<std::size_t, kEdgeKinds> counts{};
    for (const auto edge : boost::make_iterator_range(boost::edges(graph_))) {
      ++counts[static_cast<std::size_t>(graph_[edge].kind)];
    }
    std::string text = fmt::format(
        "schedule graph of step {}: {} vertices, {} edges ({} without those that "
        "follow from others)\n",
        Printable(step_.name), boost::num_vertices(graph_), boost::num_edges(graph_),
        boost::num_edges(TransitiveReduction(graph_)));
    for (std::size_t k = 0; k < counts.size(); ++k) {
      text += fmt::format("  {}: {}\n", Name(static_cast<EdgeKind>(k)), counts[k]);
    }
    return text;
  }

  std::string Moves() const {
    std::string text = "where each collective may be issued\n";
    const std::vector<TriggerRange> ranges = MovableRanges(graph_);
    for (std::size_t v = 0; v < ranges.size(); ++v) {
      const ScheduleNode& node = graph_[v];
      if (node.instruction < 0 || !IsCollective(InstructionOf(node).kind)) continue;
      text += fmt::format("  {}\n    {}, may be from {} to {}\n", Text(node), At(node.trigger),
                          At(ranges[v].first), At(ranges[v].last));
    }
    return text;
  }

  std::string BarriersText() const {
    std::vector<bool> works(boost::num_vertices(graph_));
    for (std::size_t v = 0; v < works.size(); ++v) {
      works[v] = graph_[v].instruction >= 0 && IsWork(InstructionOf(graph_[v]).kind);
    }
    std::string text = "no work can move across\n";
    for (const std::int32_t v : Barriers(graph_, works)) text += fmt::format("  {}\n", Line(graph_[v]));
    return text;
  }

  std::string CriticalPathText(const InstructionDuration& duration_ns) const {
    const LongestPath path = FindLongestPath(graph_, [&](const ScheduleNode& node) {
      return node.instruction < 0 ? Nanoseconds{} : duration_ns(node.trigger, node.instruction);
    });
    std::string text =
        fmt::format("critical path: {:.3f} ms, each instruction as long as in the simulation\n",
                    Milliseconds(path.length_ns));
    for (const std::int32_t v : path.vertices) {
      const ScheduleNode& node = graph_[v];
      if (node.instruction < 0) continue;
      const Nanoseconds duration = duration_ns(node.trigger, node.instruction);
      if (duration.value == 0) continue;
      text += fmt::format("  {:9.3f} ms  {}\n", Milliseconds(duration), Line(node));
    }
    return text;
  }

 private:
  static double Milliseconds(Nanoseconds ns) { return static_cast<double>(ns.value) / 1e6; }
  const Instruction& InstructionOf(const ScheduleNode& node) const {
    return step_.triggers[node.trigger].instructions[node.instruction];
  }
  std::string At(std::int32_t trigger) const { return Describe(plan_, step_.triggers[trigger]); }
  std::string Text(const ScheduleNode& node) const {
    return Describe(plan_, step_.triggers[node.trigger], InstructionOf(node));
  }
  std::string Line(const ScheduleNode& node) const {
    if (node.instruction < 0) return At(node.trigger);
    return fmt::format("{}, {}", Text(node), At(node.trigger));
  }

  const Plan& plan_;
  const PlanStep& step_;
  const ScheduleGraph& graph_;
};

}  // namespace

std::string ScheduleGraphviz(const Plan& plan, std::int32_t step) {
  SHARDPLAN_ASSERT(step >= 0 && step < std::ssize(plan.steps), "the caller names a step of the plan");
  return WriteGraphviz(BuildScheduleGraphs(plan)[step], plan, plan.steps[step]);
}

std::string ExplainSchedule(const Plan& plan, std::int32_t step, const InstructionDuration& duration_ns) {
  SHARDPLAN_ASSERT(step >= 0 && step < std::ssize(plan.steps), "the caller names a step of the plan");
  const ScheduleGraph graph = BuildScheduleGraphs(plan)[step];
  const ScheduleExplainer explainer(plan, plan.steps[step], graph);
  std::string text = explainer.Edges() + explainer.Moves() + explainer.BarriersText();
  if (duration_ns) text += explainer.CriticalPathText(duration_ns);
  return text;
}

}  // namespace shardplan
