// SPDX-License-Identifier: Apache-2.0
// The lower bound: below the step of every plan of the class, whatever the cluster and the prices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "optimize/prices.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/verifier.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/pooled_memory.h"
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
  void Check(std::uint32_t seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const BoundCase c = RandomBoundCase(seed);
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
    if (!planned || !planned->faults.empty() || !CheckPlanClass(planned->plan)) return;
    const Plan& plan = planned->plan;
    CheckWork(seed, c, plan, Recomputes(plan));
    // What does not recompute is of the class in which plans may.
    if (!HasFailure()) CheckWork(seed, c, plan, true);
    ++checked_;
  }

  void CheckWork(std::uint32_t seed, const BoundCase& c, const Plan& plan, bool recomputation) {
    SCOPED_TRACE(::testing::Message() << "recomputation " << recomputation);
    const Result<StepWork> work = StepWork::Make(c.trace, plan, recomputation);
    ASSERT_TRUE(work.has_value()) << ToString(work.error());
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
    if (step.value > 0)
      gaps_ += 0.5 - static_cast<double>(found.lower_bound_ns.value) / (2 * static_cast<double>(step.value));
  }

  double gaps_ = 0;
  int checked_ = 0;
};

TEST_F(BoundOfRandomPlans, IsNeverAboveTheStep) {
  std::uint32_t first = 1, plans = 100;  // more: tools/nightly --only optimizer
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr) {
    first = static_cast<std::uint32_t>(std::atoi(seed));
    plans = 1;
  }
  if (const char* more = std::getenv("SHARDPLAN_RANDOM_PLANS"); more != nullptr) plans = std::atoi(more);
  for (std::uint32_t seed = first; seed < first + plans && !HasFailure(); ++seed) Check(seed);
  RecordProperty("cases", static_cast<int>(plans));
  if (plans < 100) return;
  // Many random plans are of the class, and the bound is no trifle of their steps.
  EXPECT_GT(checked_, plans / 4);
  EXPECT_LT(gaps_ / checked_, 0.9);
}

// What nobody trains nobody updates: FSDP2 leaves it gathered on the smaller mesh from step to step, and the
// first gather is from there.
TEST(PlanClass, HasNoPlanThatStaysGatheredInPart) {
  const BoundCase c = RandomBoundCase(4070);  // frozen, resharded to two of four ranks
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  const Status in_class = CheckPlanClass(planned->plan);
  ASSERT_FALSE(in_class.has_value());
  EXPECT_NE(in_class.error().message.find("in part"), std::string::npos) << in_class.error().message;
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
