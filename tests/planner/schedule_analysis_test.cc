// SPDX-License-Identifier: Apache-2.0
// Questions to a schedule graph: reduction, moves, barriers, critical path.
#include "passes/schedule_analysis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "passes/linearise.h"
#include "shardplan/planner/planner.h"
#include "tests/planner/planned.h"

namespace shardplan {
namespace {

using ::testing::HasSubstr;
using testing::LayeredTrace;
using testing::Planned;

// Vertices that can be reached from each vertex, itself not counted.
std::vector<std::set<std::size_t>> Descendants(const ScheduleGraph& graph) {
  std::vector<std::set<std::size_t>> all(boost::num_vertices(graph));
  for (auto v = static_cast<std::uint32_t>(all.size()); v-- > 0;) {
    for (const auto edge : boost::make_iterator_range(boost::out_edges(v, graph))) {
      const std::size_t target = boost::target(edge, graph);
      all[v].insert(target);
      all[v].insert(all[target].begin(), all[target].end());
    }
  }
  return all;
}

TEST(ScheduleAnalysisTest, TheReductionHasTheSamePathsAndNoEdgeTooMany) {
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    const Plan plan = Planned(LayeredTrace(3, 8, 8, 16), {.policy = policy}, 4);
    const ScheduleGraph graph = BuildScheduleGraphs(plan)[plan.steady_step];
    const ScheduleGraph reduced = TransitiveReduction(graph);
    const auto descendants = Descendants(graph);
    ASSERT_EQ(Descendants(reduced), descendants);
    EXPECT_LT(boost::num_edges(reduced), boost::num_edges(graph));
    for (std::uint32_t v = 0; v < boost::num_vertices(reduced); ++v) {
      std::set<std::size_t> targets;
      for (const auto edge : boost::make_iterator_range(boost::out_edges(v, reduced))) {
        EXPECT_TRUE(targets.insert(boost::target(edge, reduced)).second) << "two edges from " << v;
      }
      for (const std::size_t target : targets) {
        for (const std::size_t between : targets) {
          EXPECT_FALSE(descendants[between].contains(target)) << v << " to " << target;
        }
      }
    }
  }
}

// A vertex that every other one is ordered with is a barrier, and nothing else is: of all vertices, and of
// those on streams.
TEST(ScheduleAnalysisTest, BarriersAreWhatEverythingIsOrderedWith) {
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    const Plan plan = Planned(LayeredTrace(3, 8, 8, 16), {.policy = policy}, 4);
    const ScheduleGraph graph = BuildScheduleGraphs(plan)[plan.steady_step];
    const auto descendants = Descendants(graph);
    const PlanStep& step = plan.steps[plan.steady_step];
    std::vector<bool> all(descendants.size(), true), working(descendants.size());
    for (std::size_t v = 0; v < descendants.size(); ++v) {
      if (graph[v].instruction < 0) continue;
      const Instruction& i = step.triggers[graph[v].trigger].instructions[graph[v].instruction];
      working[v] = i.stream >= 0 && i.kind != InstructionKind::kAllocate && i.kind != InstructionKind::kFree;
    }
    for (const std::vector<bool>& among : {all, working}) {
      std::vector<std::int32_t> expected;
      for (std::size_t v = 0; v < among.size(); ++v) {
        bool is_ordered = among[v];
        for (std::size_t w = 0; w < among.size(); ++w) {
          is_ordered =
              is_ordered && (!among[w] || w == v || descendants[v].contains(w) || descendants[w].contains(v));
        }
        if (is_ordered) expected.push_back(static_cast<std::int32_t>(v));
      }
      EXPECT_EQ(Barriers(graph, among), expected);
      EXPECT_FALSE(expected.empty());
    }
  }
}

// The trigger that a vertex has in the order of these priorities.
std::int32_t TriggerIn(const ScheduleGraph& graph, const std::vector<std::uint64_t>& priorities,
                       std::size_t vertex) {
  std::int32_t trigger = -1;
  for (const std::int32_t v : TopologicalOrder(graph, priorities)) {
    if (graph[v].instruction < 0) trigger = graph[v].trigger;
    if (v == static_cast<std::int32_t>(vertex)) break;
  }
  return trigger;
}

TEST(ScheduleAnalysisTest, MovesAreAsFarAsSomeOrderGoesAndNoFarther) {
  const Plan plan = Planned(LayeredTrace(4, 8, 8, 16), {}, 4);
  const ScheduleGraph graph = BuildScheduleGraphs(plan)[plan.steady_step];
  const std::vector<TriggerRange> ranges = MovableRanges(graph);
  const auto descendants = Descendants(graph);
  int movable = 0;
  for (std::size_t v = 0; v < ranges.size(); ++v) {
    const ScheduleNode& node = graph[v];
    ASSERT_LE(ranges[v].first, node.trigger);
    ASSERT_GE(ranges[v].last, node.trigger);
    if (node.is_fixed) {
      EXPECT_EQ(ranges[v], (TriggerRange{node.trigger, node.trigger}));
    }
    movable += ranges[v].first < ranges[v].last;
    // The vertices that have to come before it, then itself; or all that may come before it.
    std::vector<std::uint64_t> early(ranges.size()), late(ranges.size());
    for (std::size_t w = 0; w < ranges.size(); ++w) {
      early[w] = w + (w == v || descendants[w].contains(v) ? 0 : ranges.size());
      late[w] = w + (w == v || descendants[v].contains(w) ? ranges.size() : 0);
    }
    EXPECT_EQ(TriggerIn(graph, early, v), ranges[v].first) << "vertex " << v;
    EXPECT_EQ(TriggerIn(graph, late, v), ranges[v].last) << "vertex " << v;
  }
  EXPECT_GT(movable, 10);
}

TEST(ScheduleAnalysisTest, TheCriticalPathIsALongestOne) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8, 16), {}, 4);
  const ScheduleGraph graph = BuildScheduleGraphs(plan)[plan.steady_step];
  const auto duration = [](const ScheduleNode& node) {
    return Nanoseconds{node.instruction < 0 ? 0 : 1 + (7 * node.trigger + 3 * node.instruction) % 11};
  };
  std::vector<std::int64_t> end(boost::num_vertices(graph), 0);
  std::int64_t longest = 0;
  for (std::uint32_t v = 0; v < end.size(); ++v) {
    end[v] += duration(graph[v]).value;
    longest = std::max(longest, end[v]);
    for (const auto edge : boost::make_iterator_range(boost::out_edges(v, graph))) {
      std::int64_t& next = end[boost::target(edge, graph)];
      next = std::max(next, end[v]);
    }
  }
  const LongestPath path = FindLongestPath(graph, duration);
  EXPECT_EQ(path.length_ns.value, longest);
  std::int64_t sum = 0;
  for (std::size_t k = 0; k < path.vertices.size(); ++k) {
    sum += duration(graph[path.vertices[k]]).value;
    if (k == 0) continue;
    const auto from = static_cast<std::uint32_t>(path.vertices[k - 1]);
    EXPECT_TRUE(boost::edge(from, static_cast<std::uint32_t>(path.vertices[k]), graph).second);
  }
  EXPECT_EQ(sum, longest);
}

TEST(ScheduleExplanationTest, SaysWhereACollectiveMayMove) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8), {}, 4);
  const std::string text = ExplainSchedule(plan, plan.steady_step);
  EXPECT_THAT(text, HasSubstr("all_gather layers.1.all_gather_output"));
  EXPECT_THAT(text, HasSubstr("may be from"));
  EXPECT_THAT(text, HasSubstr("no work can move across\n"));
  EXPECT_EQ(text.find("critical path"), std::string::npos);
}

}  // namespace
}  // namespace shardplan
