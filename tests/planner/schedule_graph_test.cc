// SPDX-License-Identifier: Apache-2.0
// The schedule graph: every topological order of it is a correct program, and each kind of edge is needed for
// that.
#include "passes/schedule_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "passes/linearise.h"
#include "recording.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/planned.h"
#include "tests/planner/random_cases.h"
#include "tests/planner/random_orders.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
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

// The allocated bytes when the simulation of the plan ends; nullopt where the simulator refuses it.
std::optional<Bytes> BytesAtTheEnd(const Plan& plan) {
  static const Result<Cluster> kH100 = ReadCluster(SHARDPLAN_SOURCE_DIR "/tools/clusters/h100_sxm_8.json");
  Plan moved = plan;
  moved.cluster = kH100.value();
  moved.cluster.ranks = moved.cluster.ranks_per_node = plan.world_size;
  const Result<Simulation> simulation = Simulate(moved, {});
  if (!simulation) return std::nullopt;
  return simulation->memory.empty() ? Bytes{} : simulation->memory.back().total_bytes;
}

void ExpectCorrectInEveryOrder(const Plan& plan, std::uint32_t first_seed, std::uint32_t seeds) {
  const std::vector<ScheduleGraph> graphs = BuildScheduleGraphs(plan);
  const std::optional<Bytes> at_the_end = BytesAtTheEnd(plan);
  ASSERT_TRUE(at_the_end.has_value());
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
  for (const char* folder : {"fsdp1", "fsdp2", "live", "own"}) {
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

// The golden strategies, on every golden trace that they can be planned for.
TEST(ScheduleGraphTest, EveryOrderOfAGoldenStrategyIsCorrect) {
  const std::filesystem::path goldens = SHARDPLAN_SOURCE_DIR "/tests/planner/goldens";
  std::vector<Trace> traces;
  for (const auto& entry : std::filesystem::directory_iterator(goldens / "traces")) {
    Result<Trace> trace = ReadTrace(entry.path().string());
    ASSERT_TRUE(trace) << ToString(trace.error());
    traces.push_back(std::move(*trace));
  }
  std::uint32_t checked = 0;
  for (const char* policy : {"fsdp1", "fsdp2"}) {
    for (const auto& entry : std::filesystem::directory_iterator(goldens / policy)) {
      const Result<Strategy> strategy = ReadStrategy((entry.path() / "strategy.json").string());
      if (!strategy) continue;  // a file, or a strategy that is refused on purpose
      SCOPED_TRACE(entry.path().string());
      for (const Trace& trace : traces) {
        for (const std::int64_t ranks : {2, 4}) {
          const Result<PlannerOutput> planned =
              MakePlan(trace, *strategy, ClusterOf(ranks), {.verify = false});
          if (!planned || !Verify(planned->plan).empty()) continue;
          ExpectCorrectInEveryOrder(planned->plan, checked++, 2);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(checked, 500u);
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
  ScheduleGraphParts parts = testing::PartsOf(graphs[0]);
  parts.AddEdge(parts.nodes.size() - 1, 0, EdgeKind::kData);
  graphs[0] = parts.Graph();
  const Result<std::vector<PlanStep>> steps = Linearise(plan, graphs);
  ASSERT_FALSE(steps);
  EXPECT_EQ(steps.error().code, ErrorCode::kInternal);
}

}  // namespace
}  // namespace shardplan
