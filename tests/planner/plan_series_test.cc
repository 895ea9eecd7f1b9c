// SPDX-License-Identifier: Apache-2.0
// Plans that are made to be simulated take the time and the memory of those that are made to be run.
#include "plan_series.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "optimize/evaluator.h"
#include "shardplan/planner/planner.h"
#include "shardplan/simulator/simulate.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using testing::Random;
using testing::RandomBoundCase;

// The case's own strategy, and others of the same trace: what plans of a series share must not tell of the
// plan that was made before.
std::vector<Strategy> StrategiesOf(const testing::BoundCase& c, Random& random) {
  std::vector<Strategy> strategies = {c.strategy};
  for (int i = 0; i < 3; ++i) {
    Strategy other = c.strategy;
    if (random.Chance(50)) other.reshard_after_forward = random.Chance(50);
    if (random.Chance(30)) other.units.clear();
    other.fsdp2.forward_prefetch = random.Below(3);
    other.fsdp1.forward_prefetch = random.Chance(50);
    other.checkpoint.reset();
    if (const std::vector<Module>& modules = c.trace.modules; modules.size() > 1 && random.Chance(50)) {
      const auto module = 1 + random.Below(static_cast<int>(modules.size()) - 1);
      other.checkpoint = CheckpointRule{.modules = {modules[static_cast<std::size_t>(module)].fqn}};
      if (random.Chance(50)) other.checkpoint->save = {{"aten.mm", random.Below(3)}};
    }
    strategies.push_back(std::move(other));
  }
  strategies.push_back(c.strategy);
  return strategies;
}

TEST(PlanSeries, TakesTheTimeAndTheMemoryOfThePlan) {
  std::uint32_t first = 1, last = 60;
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr) first = last = std::atoi(seed);
  int compared = 0;
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    const testing::BoundCase c = RandomBoundCase(seed);
    Random random(seed);
    const PlanSeries series(c.trace, c.cluster);
    for (const Strategy& strategy : StrategiesOf(c, random)) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", policy " << strategy.policy);
      const Result<PlannerOutput> whole = MakePlan(c.trace, strategy, c.cluster, {.verify = false});
      const Result<Plan> plan = series.Make(strategy);
      ASSERT_EQ(whole.has_value(), plan.has_value()) << ToString(whole ? plan.error() : whole.error());
      if (!whole) {
        EXPECT_EQ(ToString(whole.error()), ToString(plan.error()));
        continue;
      }
      const Result<Simulation> simulated = Simulate(whole->plan, {});
      ASSERT_TRUE(simulated.has_value()) << ToString(simulated.error());
      const Result<optimize::Evaluation> of_whole = optimize::Measure(whole->plan);
      const Result<optimize::Evaluation> measured = optimize::Measure(*plan);
      ASSERT_TRUE(of_whole.has_value() && measured.has_value());
      EXPECT_EQ(measured->step_ns, simulated->report.step_ns);
      EXPECT_EQ(measured->allocated_bytes, simulated->report.memory.peak_bytes);
      EXPECT_EQ(measured->pooled_bytes, of_whole->pooled_bytes);
      EXPECT_EQ(measured->work_ns, of_whole->work_ns);
      EXPECT_EQ(*ReservedWithoutBudget(*plan, {}), *ReservedWithoutBudget(whole->plan, {}));
      ++compared;
    }
  }
  EXPECT_GE(compared, first == last ? 0 : 60);
}

}  // namespace
}  // namespace shardplan
