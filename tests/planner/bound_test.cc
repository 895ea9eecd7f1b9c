// SPDX-License-Identifier: Apache-2.0
// The lower bound: below the step of every plan of the class, whatever the cluster and the prices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "optimize/prices.h"
#include "shardplan/planner/planner.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using testing::BoundCase;
using testing::Random;
using testing::RandomBoundCase;
using testing::RandomPrices;
using testing::Recomputes;
using testing::StepOf;

class BoundOfRandomPlans : public ::testing::Test {
 protected:
  void Check(std::uint32_t seed) { Check(seed, RandomBoundCase(seed)); }

  // The same with collectives of the model.
  void CheckCommunicating(std::uint32_t seed) {
    if (const std::optional<BoundCase> c = testing::Communicating(seed, RandomBoundCase(seed)); c)
      Check(seed, *c);
  }

  void Check(std::uint32_t seed, const BoundCase& c) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
    if (!planned || !planned->faults.empty() || !CheckPlanClass(planned->plan)) return;
    const Plan& plan = planned->plan;
    CheckWork(seed, c, plan, Recomputes(plan));
    // A plan that does not recompute is of the class in which plans may.
    if (!HasFailure()) CheckWork(seed, c, plan, true);
    if (!HasFailure()) CheckWork(seed, c, plan, Recomputes(plan), true);
    ++checked_;
    if (!HasFailure()) CheckOffloading(seed, c);
  }

  // The same with activations in host memory, where the random case has them there.
  void CheckOffloading(std::uint32_t seed, BoundCase c) {
    c.strategy.activation_offload = testing::RandomCase(seed, seed % 5 == 0).strategy.activation_offload;
    if (!c.strategy.activation_offload) return;
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
    if (!planned || !CheckPlanClass(planned->plan) || !OffloadsActivations(planned->plan)) return;
    CheckWork(seed, c, planned->plan, Recomputes(planned->plan), true);
    ++offloading_;
  }

  void CheckWork(std::uint32_t seed, const BoundCase& c, const Plan& plan, bool recomputation,
                 bool activation_offload = false) {
    SCOPED_TRACE(::testing::Message() << "recomputation " << recomputation << ", activations in host memory "
                                      << activation_offload);
    const Result<StepWork> work =
        StepWork::Make(c.trace, plan, recomputation, activation_offload, SharesPools(plan));
    ASSERT_TRUE(work.has_value()) << ToString(work.error());
    waiting_ += work->ModelWait().value > 0;
    on_meshes_ += work->Meshes().size() > 1;
    const Bytes pooled = PoolMemory(plan).pooled_bytes;
    const Nanoseconds step = StepOf(plan);
    EXPECT_LE(work->LeastMemory(), pooled);
    EXPECT_LE(work->HostBound(), step);
    const LayoutKind layout = plan.policy == "fsdp1" ? LayoutKind::kFlat : LayoutKind::kPerParameter;
    std::vector<std::int64_t> cuts;
    Random random(seed ^ 0x5bd1e995U);
    for (std::int64_t position = 1; position <= 2 * work->operators(); ++position) {
      if (random.Chance(30)) cuts.push_back(position);
    }
    const WindowedWork windowed(*work, cuts, layout, pooled);
    for (int i = 0; i < 20; ++i) {
      const CertificateBranch prices = RandomPrices(random, windowed, c.cluster);
      const Result<Nanoseconds> value = windowed.Value(prices.windows, prices.bytes);
      ASSERT_TRUE(value.has_value()) << ToString(value.error());
      EXPECT_LE(*value, step) << "policy " << plan.policy << ", prices " << i;
    }
    const CertificateBranch found = optimize::FindPrices(*work, optimize::ChooseCuts(*work), layout, pooled);
    EXPECT_LE(found.lower_bound_ns, step) << "policy " << plan.policy;
    if (step.value > 0 && !activation_offload)
      gaps_ += 0.5 - static_cast<double>(found.lower_bound_ns.value) / (2 * static_cast<double>(step.value));
  }

  double gaps_ = 0;
  int checked_ = 0, offloading_ = 0, waiting_ = 0, on_meshes_ = 0;
};

TEST_F(BoundOfRandomPlans, IsNeverAboveTheStep) {
  std::uint32_t first = 1, plans = 50;  // more: tools/nightly --only optimizer
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr) {
    first = static_cast<std::uint32_t>(std::atoi(seed));
    plans = 1;
  }
  if (const char* more = std::getenv("SHARDPLAN_RANDOM_PLANS"); more != nullptr) plans = std::atoi(more);
  for (std::uint32_t seed = first; seed < first + plans && !HasFailure(); ++seed) Check(seed);
  RecordProperty("cases", static_cast<int>(plans));
  if (plans < 50) return;
  // Many random plans are of the class, and the bound is no trifle of their steps.
  EXPECT_GT(checked_, plans / 4);
  EXPECT_GT(offloading_, plans / 20);
  EXPECT_LT(gaps_ / checked_, 0.9);
}

TEST_F(BoundOfRandomPlans, IsNeverAboveTheStepOfAModelThatCommunicates) {
  std::uint32_t first = 1, plans = 50;
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr) {
    first = static_cast<std::uint32_t>(std::atoi(seed));
    plans = 1;
  }
  if (const char* more = std::getenv("SHARDPLAN_RANDOM_PLANS"); more != nullptr) plans = std::atoi(more);
  for (std::uint32_t seed = first; seed < first + plans && !HasFailure(); ++seed) CheckCommunicating(seed);
  if (plans < 50) return;
  EXPECT_GT(checked_, plans / 4);
  EXPECT_GT(waiting_, plans / 4);
  EXPECT_GT(on_meshes_, plans / 20);
}

// Links are fast here, and the model waits for its own collectives as long as it computes: one after the
// other, the step is both. A bound on work of links alone would be half of it.
TEST(BoundOfModelCollectives, IsComputeAndWaitsInOrder) {
  Trace trace = testing::LayeredTrace(6, 64, 64, 16);
  trace.world_size = 4;
  trace.communicators = {{"ep", 4, 1}};
  Cluster cluster = testing::ClusterOf(4);
  cluster.ranks_per_node = 4;
  cluster.compute_rate_while_communicating_ppm = 900'000;
  cluster.communication_rate_while_computing_ppm = 950'000;
  cluster.links = {{"inner", {0}, 1'000'000'000'000}};
  cluster.collectives.clear();
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    std::vector<TraceEvent> events;
    for (const TraceEvent& event : passes->front().events) {
      events.push_back(event);
      auto* op = std::get_if<OperatorEvent>(&events.back());
      if (op == nullptr) continue;
      op->duration_ns = {1'000'000};
      OperatorEvent exchange{.name = "c10d.alltoall", .module = 0, .duration_ns = {1'000'000}};
      exchange.collective =
          ModelCollective{.kind = CollectiveKind::kAllToAll, .communicator = 0, .size_bytes = Bytes{64}};
      events.push_back(exchange);
    }
    passes->front().events = std::move(events);
  }
  const Result<PlannerOutput> planned = MakePlan(trace, {}, cluster);
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  const Status in_class = CheckPlanClass(planned->plan);
  ASSERT_TRUE(in_class.has_value()) << in_class.error().message;
  const Result<StepWork> work = StepWork::Make(trace, planned->plan, false);
  ASSERT_TRUE(work.has_value());
  const CertificateBranch found =
      optimize::FindPrices(*work, optimize::ChooseCuts(*work), LayoutKind::kPerParameter, testing::kLoose);
  const Nanoseconds step = StepOf(planned->plan);
  EXPECT_LE(found.lower_bound_ns, step);
  EXPECT_GT(found.lower_bound_ns.value * 10, step.value * 9) << "of " << step.value;
  EXPECT_GE(work->ModelWait().value * 21, step.value * 10);
}

// A unit that nobody trains is updated by nobody: FSDP2 leaves it gathered on the smaller mesh from step to
// step, and the first gather is from there.
TEST(PlanClass, HasNoPlanThatStaysGatheredInPart) {
  const BoundCase c = RandomBoundCase(4070);  // frozen, resharded to two of four ranks
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  const Status in_class = CheckPlanClass(planned->plan);
  ASSERT_FALSE(in_class.has_value());
  EXPECT_NE(in_class.error().message.find("in part"), std::string::npos) << in_class.error().message;
}

// PyTorch keeps on part of the ranks only what is cut by rows, and so the bound counts parts of padded rows.
TEST(PlanClass, KeepsNothingInPartThatIsNotCutByRows) {
  const Strategy strategy{.reshard_after_forward = std::int64_t{2}};
  Result<PlannerOutput> planned = MakePlan(testing::LayeredTrace(3, 8, 8), strategy, testing::ClusterOf(4));
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  EXPECT_TRUE(CheckPlanClass(planned->plan).has_value());
  for (Unit& unit : planned->plan.units) {
    for (UnitParameter& parameter : unit.parameters) parameter.shard_dim = 1;
  }
  const Status in_class = CheckPlanClass(planned->plan);
  ASSERT_FALSE(in_class.has_value());
  EXPECT_NE(in_class.error().message.find("by rows"), std::string::npos) << in_class.error().message;
}

struct StepAndBound {
  Nanoseconds step, bound;
};

// Blocks of about 2^20 parameters each on two nodes of two ranks, between which a link is slow, in the memory
// that the plan needs. `part`: they are kept on so many ranks for the backward; 0: they are cut along their
// columns, and gathered again.
StepAndBound OnTwoNodes(int blocks, std::int64_t rows, std::int64_t part) {
  const Trace trace = testing::LayeredTrace(blocks, rows, (1 << 20) / rows);
  Cluster cluster = testing::ClusterOf(4);
  cluster.ranks_per_node = 2;
  cluster.links = {{"inner", {500}, 100'000'000'000}, {"outer", {2'000}, 1'000'000'000}};
  cluster.collectives.clear();
  Strategy strategy{.units = {{.modules = {"class:Block"}}, {.modules = {""}}}};
  strategy.reshard_after_forward = part > 0 ? ReshardAfterForward(part) : ReshardAfterForward(true);
  for (const Parameter& parameter : trace.parameters) {
    if (part == 0) strategy.fsdp2.shard_dims.push_back({{parameter.fqn}, 1});
  }
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
  EXPECT_TRUE(planned.has_value()) << ToString(planned.error());
  if (!planned) return {};
  EXPECT_TRUE(CheckPlanClass(planned->plan).has_value());
  const Result<StepWork> work = StepWork::Make(trace, planned->plan, false);
  EXPECT_TRUE(work.has_value());
  if (!work) return {};
  const CertificateBranch found = optimize::FindPrices(
      *work, optimize::ChooseCuts(*work), LayoutKind::kPerParameter, PoolMemory(planned->plan).pooled_bytes);
  return {StepOf(planned->plan), found.lower_bound_ns};
}

// Two rows make four pieces of one row each, half of them padding: a node's half of them is as large as the
// whole parameter. Four rows could be kept within a node, and cost no gather between nodes.
TEST(BoundPadding, CountsInWhatIsKeptOnPartOfTheRanks) {
  const StepAndBound two = OnTwoNodes(24, 2, 0), four = OnTwoNodes(24, 4, 0);
  EXPECT_EQ(two.step, four.step);
  EXPECT_LE(two.bound, two.step);
  EXPECT_GT(two.bound.value * 10, four.bound.value * 11) << four.bound.value << " ns of " << four.step.value;
}

// With many blocks most of the memory is what is kept: a bound that counted more of it would have no room for
// all, and gather some between nodes, too. Four rows have no padding, which the bound leaves out of gathers.
TEST(BoundPadding, IsNoMoreThanThePlanHas) {
  for (const std::int64_t rows : {2, 3, 4, 5}) {
    const StepAndBound kept = OnTwoNodes(96, rows, 2);
    EXPECT_LE(kept.bound, kept.step) << rows << " rows";
    if (rows == 4) {
      EXPECT_GT(kept.bound.value * 10, kept.step.value * 7) << kept.bound.value << " ns";
    }
  }
}

// While a gradient is made there are the shard, its two states of AdamW, the parameter that the operator
// reads and the gradient that it writes: half of 2^20 elements three times, and all of them twice.
TEST(LeastMemory, CountsAGradientBesideItsParameter) {
  const Trace trace = testing::LayeredTrace(1, 1024, 1024);
  const Result<PlannerOutput> planned = MakePlan(trace, {}, testing::ClusterOf(2));
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  const Result<StepWork> work = StepWork::Make(trace, planned->plan, false);
  ASSERT_TRUE(work.has_value());
  constexpr std::int64_t kParameter = (4 << 20), kActivations = 1 << 16;
  const std::int64_t expected = kParameter / 2 * 3 + kParameter * 2;
  EXPECT_GE(work->LeastMemory().value, expected - 1024);
  EXPECT_LE(work->LeastMemory().value, expected + kActivations);
  EXPECT_LE(work->LeastMemory(), PoolMemory(planned->plan).pooled_bytes);
}

// Prices that a window cannot earn are refused: each of them a little above the highest.
TEST(BoundPrices, AreRefusedAboveWhatAWindowEarns) {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) {
    const BoundCase c = RandomBoundCase(seed);
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
    if (!planned || !CheckPlanClass(planned->plan)) continue;
    const Result<StepWork> work = StepWork::Make(c.trace, planned->plan, true);
    ASSERT_TRUE(work.has_value());
    const WindowedWork windowed(*work, {1, 2}, LayoutKind::kPerParameter, Bytes{1 << 30});
    Random random(seed);
    CertificateBranch branch = RandomPrices(random, windowed, c.cluster);
    ASSERT_TRUE(windowed.Value(branch.windows, branch.bytes).has_value());
    for (std::size_t w = 0; w < branch.windows.size(); ++w) {
      CertificateBranch raised = branch;
      raised.windows[w].kernels = kPriceScale + 1;
      EXPECT_FALSE(windowed.Value(raised.windows, raised.bytes).has_value()) << "seed " << seed;
      raised = branch;
      raised.windows[w].links.back() += kPriceScale;
      raised.windows[w].kernels += 1;
      EXPECT_FALSE(windowed.Value(raised.windows, raised.bytes).has_value()) << "seed " << seed;
    }
    branch.bytes.front() = -1;
    EXPECT_FALSE(windowed.Value(branch.windows, branch.bytes).has_value()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace shardplan
