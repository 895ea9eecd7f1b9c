// The schedule graph: every topological order of it is a correct program, each kind of edge is needed for
// that, and what is said of the graph (reduction, moves, barriers, critical path) holds.
#include "passes/schedule_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "passes/linearise.h"
#include "passes/schedule_analysis.h"
#include "recording.h"
#include "shardplan/planner/planner.h"
#include "shardplan/planner/schedule.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/verifier.h"
#include "shardplan/simulator/simulate.h"
#include "tests/planner/planned.h"
#include "tests/planner/random_cases.h"
#include "tests/planner/random_orders.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::HasSubstr;
using testing::KeepsTheHostProgram;
using testing::LayeredTrace;
using testing::Planned;
using testing::RandomCase;
using testing::Reordered;
using testing::Without;

std::string WhatIsWrong(const Plan& plan) {
  const std::vector<Violation> violations = Verify(plan);
  return violations.empty() ? "" : Explain(plan, violations.front());
}

// Every rank in an order of its own.
std::string WhatIsWrongBetweenRanks(const Plan& plan, const std::vector<ScheduleGraph>& graphs,
                                    std::uint32_t seed) {
  std::vector<Plan> ranks;
  for (std::uint32_t rank = 0; rank < plan.world_size; ++rank) {
    ranks.push_back(Reordered(plan, graphs, seed + rank));
  }
  const std::vector<Violation> violations = VerifyRanks(ranks);
  return violations.empty() ? "" : Explain(plan, violations.front());
}

// What is allocated when the simulation of the plan ends; nullopt where the simulator refuses it.
std::optional<Bytes> BytesAtTheEnd(const Plan& plan) {
  static const Result<Cluster> kH100 = ReadCluster(SHARDPLAN_SOURCE_DIR "/tools/clusters/h100_sxm_8.json");
  Cluster cluster = kH100.value();
  cluster.ranks = cluster.ranks_per_node = plan.world_size;
  const Result<Simulation> simulation = Simulate(plan, {.cluster = &cluster});
  if (!simulation) return std::nullopt;
  return simulation->memory.empty() ? Bytes{} : simulation->memory.back().total_bytes;
}

void ExpectCorrectInEveryOrder(const Plan& plan, std::uint32_t first_seed, std::uint32_t seeds) {
  const std::vector<ScheduleGraph> graphs = BuildScheduleGraphs(plan);
  const std::optional<Bytes> at_the_end = BytesAtTheEnd(plan);
  const auto of_the_host = [](const Instruction& i) {  // the simulator has no such optimizer
    return i.kind == InstructionKind::kOptimizerStep && i.stream < 0;
  };
  const bool is_simulated = std::ranges::none_of(plan.steps.front().triggers, [&](const Trigger& trigger) {
    return std::ranges::any_of(trigger.instructions, of_the_host);
  });
  ASSERT_EQ(at_the_end.has_value(), is_simulated);
  for (std::uint32_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    SCOPED_TRACE("order " + std::to_string(seed));
    const Plan reordered = Reordered(plan, graphs, seed);
    ASSERT_TRUE(KeepsTheHostProgram(plan, reordered));
    ASSERT_EQ(WhatIsWrong(reordered), "");
    ASSERT_EQ(BytesAtTheEnd(reordered), at_the_end);
  }
}

Plan PlanOf(const testing::RandomPlanCase& c) { return Planned(c.trace, c.strategy, c.ranks); }

TEST(ScheduleGraphTest, EveryOrderOfARandomPlanIsCorrect) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    ExpectCorrectInEveryOrder(PlanOf(RandomCase(seed, /*may_freeze=*/seed % 2 == 0)), seed, 5);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(ScheduleGraphTest, EveryRankMayTakeAnOrderOfItsOwn) {
  for (std::uint32_t seed = 2000; seed < 2040; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = PlanOf(RandomCase(seed, /*may_freeze=*/false));
    ASSERT_EQ(WhatIsWrongBetweenRanks(plan, BuildScheduleGraphs(plan), seed), "");
  }
}

TEST(ScheduleGraphTest, EveryOrderOfARecordedCaseIsCorrect) {
  int checked = 0;
  for (const char* folder : {"fsdp1", "fsdp2", "live"}) {
    const std::string path = std::string(SHARDPLAN_SOURCE_DIR "/tests/conformance/") + folder;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() != ".log") continue;
      SCOPED_TRACE(entry.path().string());
      const Result<conformance::Recording> recording =
          conformance::ReadRecording((entry.path().parent_path() / entry.path().stem()).string());
      ASSERT_TRUE(recording) << ToString(recording.error());
      const Result<PlannerOutput> planned =
          MakePlan(recording->trace, recording->strategy, recording->cluster, {.verify = false});
      ASSERT_TRUE(planned) << ToString(planned.error());
      if (!Verify(planned->plan).empty())
        continue;  // PyTorch's own faults, which other orders have otherwise
      ExpectCorrectInEveryOrder(planned->plan, static_cast<std::uint32_t>(checked), 3);
      if (::testing::Test::HasFailure()) return;
      ++checked;
    }
  }
  EXPECT_GT(checked, 90);
}

// Random cases, and one of each that needs edges which are rare in them.
std::vector<Plan> PlansThatNeedEveryEdge() {
  std::vector<Plan> plans;
  for (std::uint32_t seed = 0; seed < 30; ++seed) plans.push_back(PlanOf(RandomCase(seed, false)));
  plans.push_back(Planned(LayeredTrace(3, 8, 8, 16), {.cpu_offload = true}, 2));
  plans.push_back(Planned(LayeredTrace(3, 8, 8, 16), {.policy = "fsdp1"}, 2));
  return plans;
}

class EdgeKindTest : public ::testing::TestWithParam<EdgeKind> {};

TEST_P(EdgeKindTest, SomeOrderIsWrongWithoutIt) {
  for (const Plan& plan : PlansThatNeedEveryEdge()) {
    const std::vector<ScheduleGraph> graphs = Without(GetParam(), BuildScheduleGraphs(plan));
    for (std::uint32_t seed = 0; seed < 10; ++seed) {
      const Plan reordered = Reordered(plan, graphs, seed);
      const bool wrong =
          !KeepsTheHostProgram(plan, reordered) || !Verify(reordered).empty() ||
          (GetParam() == EdgeKind::kCommunicator && !WhatIsWrongBetweenRanks(plan, graphs, seed).empty());
      if (wrong) return;
    }
  }
  FAIL() << "no order is wrong without edges of the kind " << Name(GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, EdgeKindTest,
                         ::testing::Values(EdgeKind::kData, EdgeKind::kMemory, EdgeKind::kReuse,
                                           EdgeKind::kStream, EdgeKind::kEvent, EdgeKind::kCommunicator,
                                           EdgeKind::kHostWait, EdgeKind::kHost),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(ScheduleGraphTest, ThePolicysOwnOrderComesBack) {
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    const Plan plan = Planned(LayeredTrace(4, 8, 8, 16), {.policy = policy}, 4);
    const Result<std::vector<PlanStep>> steps = Linearise(plan, BuildScheduleGraphs(plan));
    ASSERT_TRUE(steps);
    EXPECT_EQ(*steps, plan.steps);
  }
}

// Not because there is one order only.
TEST(ScheduleGraphTest, OrdersAreManyAndDiffer) {
  const Plan plan = Planned(LayeredTrace(4, 8, 8, 16), {}, 4);
  const std::vector<ScheduleGraph> graphs = BuildScheduleGraphs(plan);
  std::set<std::string> programs;
  for (std::uint32_t seed = 0; seed < 20; ++seed) programs.insert(ToJson(Reordered(plan, graphs, seed)));
  EXPECT_GT(programs.size(), 10u);
}

TEST(ScheduleGraphTest, ACycleIsAnError) {
  const Plan plan = Planned(LayeredTrace(2, 8, 8), {}, 2);
  std::vector<ScheduleGraph> graphs = BuildScheduleGraphs(plan);
  boost::add_edge(boost::num_vertices(graphs[0]) - 1, 0, {EdgeKind::kData}, graphs[0]);
  const Result<std::vector<PlanStep>> steps = Linearise(plan, graphs);
  ASSERT_FALSE(steps);
  EXPECT_EQ(steps.error().code, ErrorCode::kInternal);
}

// Vertices that can be reached from each vertex, itself not counted.
std::vector<std::set<std::size_t>> Descendants(const ScheduleGraph& graph) {
  std::vector<std::set<std::size_t>> all(boost::num_vertices(graph));
  for (std::size_t v = all.size(); v-- > 0;) {
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
    for (std::size_t v = 0; v < boost::num_vertices(reduced); ++v) {
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

// What is in every order at the same place is a barrier, and nothing else is.
TEST(ScheduleAnalysisTest, BarriersAreWhatEverythingIsOrderedWith) {
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    const Plan plan = Planned(LayeredTrace(3, 8, 8, 16), {.policy = policy}, 4);
    const ScheduleGraph graph = BuildScheduleGraphs(plan)[plan.steady_step];
    const auto descendants = Descendants(graph);
    std::vector<std::size_t> ancestors(descendants.size(), 0);
    for (const std::set<std::size_t>& of_one : descendants) {
      for (const std::size_t v : of_one) ++ancestors[v];
    }
    std::vector<std::int32_t> expected;
    for (std::size_t v = 0; v < descendants.size(); ++v) {
      if (ancestors[v] + descendants[v].size() + 1 == descendants.size()) {
        expected.push_back(static_cast<std::int32_t>(v));
      }
    }
    EXPECT_EQ(Barriers(graph), expected);
    EXPECT_FALSE(expected.empty());
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
    // What has to come before it, then itself; or all that may come before it.
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
  for (std::size_t v = 0; v < end.size(); ++v) {
    end[v] += duration(graph[v]).value;
    longest = std::max(longest, end[v]);
    for (const auto edge : boost::make_iterator_range(boost::out_edges(v, graph))) {
      std::int64_t& next = end[boost::target(edge, graph)];
      next = std::max(next, end[v]);
    }
  }
  const CriticalPath path = FindCriticalPath(graph, duration);
  EXPECT_EQ(path.length_ns.value, longest);
  std::int64_t sum = 0;
  for (std::size_t k = 0; k < path.vertices.size(); ++k) {
    sum += duration(graph[path.vertices[k]]).value;
    if (k == 0) continue;
    EXPECT_TRUE(boost::edge(path.vertices[k - 1], path.vertices[k], graph).second);
  }
  EXPECT_EQ(sum, longest);
}

TEST(ScheduleExplanationTest, SaysWhereACollectiveMayMove) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8), {}, 4);
  const std::string text = ExplainSchedule(plan, plan.steady_step);
  EXPECT_THAT(text, HasSubstr("all_gather layers.1.all_gather_output"));
  EXPECT_THAT(text, HasSubstr("may be from"));
  EXPECT_THAT(text, HasSubstr("nothing can move across\n"));
  EXPECT_EQ(text.find("critical path"), std::string::npos);
}

}  // namespace
}  // namespace shardplan
