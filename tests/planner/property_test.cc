// SPDX-License-Identifier: Apache-2.0
// Random module trees, units and knobs: every plan verifies, is the same twice, reads back, and gathers and
// reduces as often as the policy's rule says.
#include <gtest/gtest.h>

#include <map>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/random_cases.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::RandomCase;

std::string Why(const Plan& plan, const std::vector<Violation>& violations) {
  return violations.empty() ? "" : Explain(plan, violations.front()) + "\n" + PlanText(plan);
}

TEST(PlannerPropertyTest, PlansVerifyAndAreDeterministic) {
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const testing::RandomPlanCase c = RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
    const PlanOptions options{.verify = false};
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options);
    ASSERT_TRUE(planned) << ToString(planned.error()) << "\n" << ToJson(c.strategy);
    ASSERT_EQ(Why(planned->plan, Verify(planned->plan)), "") << ToJson(c.strategy);
    const std::string bytes = ToJson(planned->plan);
    const Result<PlannerOutput> again = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options);
    ASSERT_EQ(bytes, ToJson(again->plan));
    const Result<Plan> read = ParsePlan(bytes);
    ASSERT_TRUE(read) << ToString(read.error());
    ASSERT_EQ(*read, planned->plan);
  }
}

TEST(PlannerPropertyTest, EachUnitIsGatheredAndReducedAsOftenAsThePolicySays) {
  int checked = 0;
  for (std::uint32_t seed = 1000; seed < 1300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomPlanCase c = RandomCase(seed, /*may_freeze=*/false);
    c.strategy.program.clear();
    c.strategy.checkpoint.reset();  // gathers what it runs again
    if (c.ranks == 1 || c.strategy.fsdp1.sharding == Fsdp1Sharding::kNoShard) continue;
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks));
    ASSERT_TRUE(planned) << ToString(planned.error());
    const Plan& plan = planned->plan;
    std::map<UnitId, int> gathers, reduces;
    for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllGather) ++gathers[plan.buffers[i.dst].unit];
        if (i.kind == InstructionKind::kReduceScatter) ++reduces[plan.buffers[i.src].unit];
      }
    }
    const bool fsdp1 = c.strategy.policy == "fsdp1";
    const bool zero2 = c.strategy.fsdp1.sharding == Fsdp1Sharding::kShardGradOp ||
                       c.strategy.fsdp1.sharding == Fsdp1Sharding::kHybridShardZero2;
    for (std::size_t u = 0; u < plan.units.size(); ++u) {
      const Unit& unit = plan.units[u];
      const auto id = static_cast<UnitId>(u);
      const int expected_reduces = unit.parameters.empty() ? 0 : 1;
      EXPECT_EQ(reduces[id], expected_reduces) << unit.fqn;
      int expected = unit.parameters.empty() ? 0 : 2;
      if (expected == 0) {
        EXPECT_EQ(gathers[id], 0);
        continue;
      }
      if (fsdp1) {
        if (unit.fqn.empty() || zero2) expected = 1;
      } else {
        std::optional<ReshardAfterForward> reshard = c.strategy.reshard_after_forward;
        for (const UnitRule& rule : c.strategy.units) {
          if (rule.modules[0] == unit.fqn && rule.reshard_after_forward) reshard = rule.reshard_after_forward;
        }
        const bool keeps = reshard ? *reshard == ReshardAfterForward(false) : unit.fqn.empty();
        if (keeps) expected = 1;
      }
      EXPECT_EQ(gathers[id], expected) << unit.fqn << "\n" << ToJson(c.strategy);
      ++checked;
    }
  }
  EXPECT_GT(checked, 500);
}

}  // namespace
}  // namespace shardplan
