// SPDX-License-Identifier: Apache-2.0
// Every rank by itself, and queues of launches: closed forms, and one rank that stands for all as the oracle.
#include <gtest/gtest.h>

#include <algorithm>

#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/critical_path.h"
#include "shardplan/simulator/engine.h"
#include "tests/simulator/layered_plan.h"
#include "tests/simulator/random_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kApartSeeds = 300;

EngineProgram LoweredApart(const Plan& plan) {
  Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  EXPECT_TRUE(program.has_value()) << ToString(program.error());
  return program ? *std::move(program) : EngineProgram{};
}

RanksApart RunApart(const Plan& plan, const RanksApartOptions& options = {}) {
  Result<RanksApart> apart = RunRanksApart(plan, LoweredApart(plan), options);
  EXPECT_TRUE(apart.has_value()) << ToString(apart.error());
  return apart ? *std::move(apart) : RanksApart{};
}

Nanoseconds StepOfOne(const Plan& plan) {
  const EngineProgram program = LoweredApart(plan);
  const Result<EngineResult> run =
      RunStep(program, static_cast<std::int32_t>(program.steps.size()) - 1, nullptr);
  EXPECT_TRUE(run.has_value());
  return run ? run->end_ns : Nanoseconds{};
}

TEST(RanksApart, AlikeTheyAreAsTheOneThatStandsForAll) {
  for (std::uint64_t seed = 1; seed <= kApartSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const RanksApart apart = RunApart(plan);
    ASSERT_EQ(apart.step_ns, StepOfOne(plan));
    ASSERT_EQ(std::ssize(apart.ranks), plan.world_size);
    for (const RankTimes& rank : apart.ranks) {
      ASSERT_EQ(rank.end_ns, apart.step_ns);
      ASSERT_EQ(rank.waited_ns.value, 0);
    }
  }
}

TEST(RanksApart, AlikeInGroupsOfShardsAndReplicas) {
  const Plan plan = LayeredPlan({.layers = 5, .all_reduce_ns = 7 * kMillisecond});
  ASSERT_EQ(plan.world_size, 4);
  EXPECT_EQ(RunApart(plan).step_ns, StepOfOne(plan));
}

// F = 25, B = 50, C = 10; rank 1 takes twice as long for its kernels. It never waits: every collective begins
// when it comes. C + 3 * 50 + 3 * 100 + C.
TEST(RanksApart, TheSlowRankSetsThePace) {
  const RanksApart apart = RunApart(LayeredPlan({}), {.stragglers = {{1, 2'000'000}}});
  EXPECT_EQ(apart.step_ns.value, 470 * kMillisecond);
  EXPECT_EQ(apart.ranks[1].waited_ns.value, 0);
  EXPECT_GT(apart.ranks[0].waited_ns.value, 0);
  EXPECT_EQ(apart.ranks[0].end_ns, apart.ranks[1].end_ns);  // the last collective ends for both
}

// In groups of two, only the slow rank's waits for it until the all_reduce joins them. With one layer the
// gather ends at 10, the others' backward at 85, the slow one's at 160; scatter 10, all_reduce 7.
TEST(RanksApart, GroupsWaitForTheirOwnSlowRankFirst) {
  const Plan plan = LayeredPlan({.layers = 1, .all_reduce_ns = 7 * kMillisecond});
  const RanksApart apart = RunApart(plan, {.stragglers = {{3, 2'000'000}}});
  EXPECT_EQ(apart.step_ns.value, (10 + 150 + 10 + 7) * kMillisecond);
  EXPECT_EQ(apart.ranks[3].waited_ns.value, 0);
  // The rank of the same group of shards waits at the scatter. The ranks of the other wait at the all_reduce,
  // as long.
  EXPECT_EQ(apart.ranks[2].waited_ns.value, 75 * kMillisecond);
  EXPECT_EQ(apart.ranks[0].waited_ns.value, 75 * kMillisecond);
  EXPECT_EQ(apart.ranks[1].waited_ns.value, 75 * kMillisecond);
}

// One layer: gather, F + B each with its own chance, scatter. The sum of computing and waiting is the same
// for all ranks.
TEST(RanksApart, ChanceIsWithinItsBoundsAndTheSameForASeed) {
  const Plan plan = LayeredPlan({.layers = 1});
  bool differ = false;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RanksApartOptions options{.jitter_ppm = 100'000, .seed = seed};
    const RanksApart apart = RunApart(plan, options);
    const RanksApart again = RunApart(plan, options);
    ASSERT_EQ(apart.step_ns, again.step_ns);
    Nanoseconds least = apart.step_ns;
    for (const RankTimes& rank : apart.ranks) {
      const std::int64_t computed_ns = (apart.step_ns - rank.waited_ns).value - 20 * kMillisecond;
      ASSERT_GE(computed_ns, 75 * kMillisecond);
      ASSERT_LE(computed_ns, 75 * kMillisecond * 11 / 10);
      least = std::min(least, rank.waited_ns);
    }
    ASSERT_EQ(least.value, 0);
    differ = differ || apart.step_ns != RunApart(plan, {.jitter_ppm = 100'000, .seed = seed + 1}).step_ns;
  }
  EXPECT_TRUE(differ);
}

TEST(RanksApart, ARankThatIsNoneIsRefused) {
  const Plan plan = LayeredPlan({});
  const Result<RanksApart> apart = RunRanksApart(plan, LoweredApart(plan), {.stragglers = {{2, 1'000'000}}});
  ASSERT_FALSE(apart.has_value());
  EXPECT_EQ(apart.error().code, ErrorCode::kBadInput);
}

// Five kernels of 10 ms on one stream, then a collective of 30 ms on another; the host takes 1 ms for a
// kernel.
Plan FiveKernelsAndACollective(std::int64_t depth) {
  PlanBuilder b(2);
  const StreamId gather = b.Stream("all_gather");
  const UnitId unit = b.Unit("a");
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId whole = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const SegmentId kernel = b.Forward("kernel", {});
  b.plan().segments[static_cast<std::size_t>(kernel)].entries = {FixedOperator(10 * kMillisecond)};
  b.Step("steady").At(TriggerKind::kPreForward, unit);
  for (int k = 0; k < 5; ++k) b.Compute(kernel);
  b.AllGather(shard, whole, gather);
  b.plan().cluster = ConstantCluster(2, 30 * kMillisecond, 0);
  b.plan().cluster.host.operator_issue_ns = {kMillisecond};
  b.plan().cluster.host.launch_queue_depth = depth;
  return b.plan();
}

// Without a limit the kernels run from 1 to 51 and the collective from 5 to 35. With room for two the host
// issues kernel k (from 0) when kernel k - 2 is done, at 1 + 10 (k - 1), so the last at 31 to 32: the
// collective ends at
// 62. With room for one it issues each when the one before is done: 11 ms a kernel, the collective at 45
// + 30.
TEST(LaunchQueue, TheHostWaitsForRoom) {
  EXPECT_EQ(StepOfOne(FiveKernelsAndACollective(0)).value, 51 * kMillisecond);
  EXPECT_EQ(StepOfOne(FiveKernelsAndACollective(5)).value, 51 * kMillisecond);
  EXPECT_EQ(StepOfOne(FiveKernelsAndACollective(2)).value, 62 * kMillisecond);
  EXPECT_EQ(StepOfOne(FiveKernelsAndACollective(1)).value, (4 * 11 + 1 + 30) * kMillisecond);
}

TEST(LaunchQueue, IsOnTheCriticalPath) {
  const Plan plan = FiveKernelsAndACollective(2);
  const Result<CriticalPath> path = FindCriticalPath(plan, LoweredApart(plan));
  ASSERT_TRUE(path.has_value());
  const TimeByCause sums = SumByCause(*path);
  EXPECT_EQ(sums[static_cast<std::size_t>(TimeCause::kAllGather)].value, 30 * kMillisecond);
  EXPECT_EQ(sums[static_cast<std::size_t>(TimeCause::kForward)].value, 30 * kMillisecond);
  EXPECT_EQ(sums[static_cast<std::size_t>(TimeCause::kHostIssue)].value, 2 * kMillisecond);
}

// Any depth: the path still adds up, ranks apart agree, and with room for everything nothing changes.
TEST(LaunchQueue, OfAnyDepthOnRandomPlans) {
  for (std::uint64_t seed = 1; seed <= kApartSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Plan plan = RandomPlan(seed);
    const Nanoseconds free = StepOfOne(plan);
    plan.cluster.host.launch_queue_depth = 1'000'000;
    ASSERT_EQ(StepOfOne(plan), free);
    plan.cluster.host.launch_queue_depth = 1 + static_cast<std::int64_t>(seed % 6);
    ASSERT_EQ(RunApart(plan).step_ns, StepOfOne(plan));
    const Result<CriticalPath> path = FindCriticalPath(plan, LoweredApart(plan));
    ASSERT_TRUE(path.has_value());
    Nanoseconds sum;
    for (const PathPart& part : path->parts) sum += part.duration_ns;
    ASSERT_EQ(sum, StepOfOne(plan));
  }
}

// A host that runs the kernels issues the collective when the last of the five is done, at 50. The operators'
// durations are measured: issuing is part of them.
TEST(HostRunsKernels, OneAfterTheOther) {
  Plan plan = FiveKernelsAndACollective(0);
  plan.cluster.host.runs_kernels = true;
  EXPECT_EQ(StepOfOne(plan).value, 80 * kMillisecond);
  const Result<CriticalPath> path = FindCriticalPath(plan, LoweredApart(plan));
  ASSERT_TRUE(path.has_value());
  const TimeByCause sums = SumByCause(*path);
  EXPECT_EQ(sums[static_cast<std::size_t>(TimeCause::kAllGather)].value, 30 * kMillisecond);
  EXPECT_EQ(sums[static_cast<std::size_t>(TimeCause::kForward)].value, 50 * kMillisecond);
}

// If nothing is known of the operator but the shortest kernel, it takes that and its issue.
TEST(HostRunsKernels, PaysTheIssueOfWhatIsModelled) {
  Plan plan = FiveKernelsAndACollective(0);
  auto& op = std::get<OperatorEvent>(plan.segments[0].entries[0]);
  op.duration_ns = {-1};
  plan.cluster.device.kernel_overhead_ns = {2 * kMillisecond};
  plan.cluster.host.runs_kernels = true;
  EXPECT_EQ(StepOfOne(plan).value, (5 * (1 + 2) + 30) * kMillisecond);
}

// A collective is issued when the one before it on its stream is done: kernels behind it wait, too. Without
// the host's part the two collectives (0 to 60) and the kernel (0 to 10) overlap.
TEST(HostRunsKernels, WaitsForACollectiveBeforeItGivesItsStreamAnother) {
  PlanBuilder b(2);
  const StreamId gather = b.Stream("all_gather");
  const UnitId unit = b.Unit("a");
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId whole = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const SegmentId kernel = b.Forward("kernel", {});
  b.plan().segments[static_cast<std::size_t>(kernel)].entries = {FixedOperator(10 * kMillisecond)};
  b.Step("steady").At(TriggerKind::kPreForward, unit);
  b.AllGather(shard, whole, gather).AllGather(shard, whole, gather).Compute(kernel);
  b.plan().cluster = ConstantCluster(2, 30 * kMillisecond, 0);
  EXPECT_EQ(StepOfOne(b.plan()).value, 60 * kMillisecond);
  b.plan().cluster.host.runs_kernels = true;
  EngineTimeline timeline;
  ASSERT_TRUE(RunStep(LoweredApart(b.plan()), 0, &timeline).has_value());
  EXPECT_EQ(timeline.begin_ns.back().value, 30 * kMillisecond);
}

TEST(HostRunsKernels, RanksApartAgreeOnRandomPlans) {
  for (std::uint64_t seed = 1; seed <= kApartSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Plan plan = RandomPlan(seed);
    plan.cluster.host.runs_kernels = true;
    ASSERT_EQ(RunApart(plan).step_ns, StepOfOne(plan));
  }
}

}  // namespace
}  // namespace shardplan::test
