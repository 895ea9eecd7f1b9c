// SPDX-License-Identifier: Apache-2.0
// Plans of models with collectives and mesh dimensions of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/planner/planned.h"

namespace shardplan::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two blocks on a job of `ranks`; one all_reduce on communicator 0 behind the first operator of the forward.
Trace Communicating(std::vector<Communicator> communicators, std::int64_t ranks) {
  Trace trace = LayeredTrace(2, 64, 64, 16);
  trace.world_size = ranks;
  trace.communicators = std::move(communicators);
  std::vector<TraceEvent>& events = trace.forwards[0].events;
  const auto first = std::ranges::find_if(
      events, [](const TraceEvent& event) { return std::holds_alternative<OperatorEvent>(event); });
  OperatorEvent op{.name = "c10d.allreduce_", .module = 0};
  op.collective =
      ModelCollective{.kind = CollectiveKind::kAllReduce, .communicator = 0, .size_bytes = Bytes{8}};
  events.insert(first + 1, op);
  return trace;
}

// Every parameter lies on `dim` (cut: dimension 0), or those of `only`.
void Place(Trace& trace, const std::string& dim, std::int64_t size, const std::string& only = "") {
  for (Parameter& parameter : trace.parameters) {
    if (only.empty() || parameter.fqn.find(only) != std::string::npos)
      parameter.placements.push_back({.mesh_dim = dim, .size = size, .dim = 0});
  }
}

std::vector<std::string> CommunicatorNames(const Plan& plan) {
  std::vector<std::string> names;
  for (const Communicator& c : plan.communicators) names.push_back(c.name);
  return names;
}

std::vector<const ModelCollective*> CollectivesOf(const Plan& plan) {
  std::vector<const ModelCollective*> found;
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* op = std::get_if<OperatorEvent>(&entry);
      if (op != nullptr && op->collective) found.push_back(&*op->collective);
    }
  }
  return found;
}

std::string ErrorOf(const Trace& trace, const Strategy& strategy, std::int64_t ranks) {
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(ranks));
  return planned ? "" : ToString(planned.error());
}

TEST(PlannedModelCollectives, HaveACommunicatorOfThePlan) {
  Trace trace = Communicating({{"tp", 2, 1}}, 4);
  Place(trace, "tp", 2);
  trace.same_batch = {"tp"};
  const Plan plan = Planned(trace, {}, 4);
  EXPECT_THAT(CommunicatorNames(plan), ElementsAre("shard", "tp"));
  ASSERT_EQ(CollectivesOf(plan).size(), 1);
  EXPECT_EQ(CollectivesOf(plan)[0]->communicator, 1);
  EXPECT_EQ(plan.ranks_per_batch, 2);
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST(PlannedModelCollectives, ShareFsdpsCommunicatorOfTheSameNameAndRanks) {
  const Plan shared = Planned(Communicating({{"shard", 4, 1}}, 4), {}, 4);
  EXPECT_THAT(CommunicatorNames(shared), ElementsAre("shard"));
  EXPECT_EQ(CollectivesOf(shared)[0]->communicator, 0);
  const Plan other = Planned(Communicating({{"shard", 2, 1}}, 4), {}, 4);
  EXPECT_THAT(CommunicatorNames(other), ElementsAre("shard", "model_shard"));
  const Plan apart = Planned(Communicating({{"loss", 4, 1}}, 4), {}, 4);
  EXPECT_THAT(CommunicatorNames(apart), ElementsAre("shard", "loss"));
}

TEST(PlannedModelCollectives, AGroupThatGrowsWithTheJobNeedsATraceOfTheJob) {
  const Trace trace = Communicating({{"loss", 4, 1}}, 4);
  EXPECT_THAT(ErrorOf(trace, {}, 8), HasSubstr("a trace whose process group has 8 ranks"));
  Trace placed = Communicating({{"tp", 4, 1}}, 4);
  Place(placed, "tp", 4);
  EXPECT_EQ(ErrorOf(placed, {}, 8), "");
  EXPECT_THAT(ErrorOf(Communicating({{"cp", 2, 1}}, 4), {}, 3), HasSubstr("not all there on so many ranks"));
}

TEST(MeshOfTrace, TensorParallelismIsNoneOfFsdps) {
  Trace trace = Communicating({{"tp", 2, 1}}, 2);
  Place(trace, "tp", 2);
  trace.same_batch = {"tp"};
  const Plan plan = Planned(trace, {}, 8);
  EXPECT_EQ(plan.mesh, (std::vector<StrategyMeshDim>{{"shard", 4}, {"tp", 2}}));
  for (const Unit& unit : plan.units)
    EXPECT_EQ(plan.communicators[static_cast<std::size_t>(unit.shard_communicator)].size, 4);
}

// Dense parameters over all data ranks, experts over those that have the same experts.
TEST(MeshOfTrace, ExpertsAreShardedOverTheRanksOfTheSameExperts) {
  Trace trace = Communicating({{"ep", 2, 1}}, 2);
  Place(trace, "ep", 2, "layers.1");
  const Plan plan = Planned(trace, {}, 8);
  EXPECT_EQ(plan.mesh, (std::vector<StrategyMeshDim>{{"shard", 4}, {"ep", 2}}));
  EXPECT_EQ(plan.ranks_per_batch, 1);
  for (const Unit& unit : plan.units) {
    const Communicator& over = plan.communicators[static_cast<std::size_t>(unit.shard_communicator)];
    const bool expert = !unit.parameters.empty() && !unit.parameters[0].placements.empty();
    EXPECT_EQ(over.size, expert ? 4 : 8) << unit.fqn;
    EXPECT_EQ(over.stride, expert ? 2 : 1) << unit.fqn;
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST(MeshOfTrace, ADimensionThatLiesOutsideOfDataRanks) {
  Trace trace = Communicating({{"tp", 2, 4}}, 8);
  Place(trace, "tp", 2);
  trace.same_batch = {"tp"};
  EXPECT_EQ(Planned(trace, {}, 16).mesh,
            (std::vector<StrategyMeshDim>{{"shard", 2}, {"tp", 2}, {"shard_inner", 4}}));
}

TEST(MeshOfTrace, AsksWhereTheTraceDoesNotSay) {
  Trace trace = LayeredTrace(2, 64, 64);
  Place(trace, "ep", 2);
  EXPECT_THAT(ErrorOf(trace, {}, 8), HasSubstr("--mesh"));
  Strategy given;
  given.mesh = {{"shard", 4}, {"ep", 2}};
  EXPECT_EQ(ErrorOf(trace, given, 8), "");
}

TEST(MeshOfTrace, ADimensionOfOneRankIsInNoMesh) {
  Trace trace = Communicating({{"tp", 2, 1}, {"ep", 1, 1}}, 2);
  Place(trace, "tp", 2);
  Place(trace, "ep", 1, "layers.1");
  trace.same_batch = {"tp"};
  EXPECT_EQ(Planned(trace, {}, 8).mesh, (std::vector<StrategyMeshDim>{{"shard", 4}, {"tp", 2}}));
}

TEST(MeshOfTrace, DimensionsThatOverlapAreRefused) {
  Trace trace = Communicating({{"tp", 2, 1}, {"ep", 4, 1}}, 4);
  Place(trace, "tp", 2, "layers.0");
  Place(trace, "ep", 4, "layers.1");
  EXPECT_THAT(ErrorOf(trace, {}, 8), HasSubstr("overlap"));
}

}  // namespace
}  // namespace shardplan::testing
