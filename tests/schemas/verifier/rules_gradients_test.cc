// SPDX-License-Identifier: Apache-2.0
// Rules on gradients: grad_not_reduced, grad_division. Each: a good plan with one mistake, and what is
// reported. Consequences of a mistake are listed, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/schemas/verifier/rules.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;

TEST_F(Rules, GradNotReducedWithoutTheCopyIn) {
  const Plan plan = test::Without(good_, Steady(good_, kGradCopyIn)[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_not_reduced", "read_before_write"}));
}

TEST_F(Rules, GradNotReducedOverTheReplicas) {
  const Plan plan = test::Without(hsdp_, Steady(hsdp_, kAllReduce)[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_not_reduced"}));
}

TEST_F(Rules, GradNotReducedButTwice) {
  const Plan plan = test::Doubled(hsdp_, Steady(hsdp_, kAllReduce)[0]);
  EXPECT_THAT(RulesOf(plan), Contains("grad_not_reduced"));
  EXPECT_THAT(RulesOf(test::Doubled(good_, Steady(good_, kReduceScatter)[0])), Contains("grad_not_reduced"));
}

TEST_F(Rules, GradNotReducedOverTheRightRanks) {
  Plan plan = hsdp_;
  test::InstructionAt(plan, Steady(plan, kReduceScatter)[0]).communicator = 1;
  EXPECT_THAT(RulesOf(plan), Contains("grad_not_reduced"));
}

TEST_F(Rules, GradNotReducedWhenAMicroBatchIsLost) {
  const Plan good = test::Fsdp2LikePlan({.units = 2, .microbatches = 2});
  ASSERT_THAT(Verify(good), IsEmpty());
  const Plan plan = test::Without(good, Steady(good, kGradAccumulate)[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_not_reduced"}));
}

TEST_F(Rules, GradNotReducedWhenTheOptimizerIsEarly) {
  Plan plan = good_;
  for (PlanStep& step : plan.steps) {
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      if (step.triggers[t].kind != TriggerKind::kPostBackward || step.triggers[t].unit != 0) continue;
      step.triggers[t].instructions.Edit().insert(step.triggers[t].instructions.Edit().begin(),
                                                  {.kind = kOptimizerStep, .stream = 0, .unit = 0});
    }
  }
  EXPECT_THAT(RulesOf(plan), Contains("grad_not_reduced"));
}

TEST_F(Rules, GradDivision) {
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kReduceScatter)[0]).reduce_op = ReduceOp::kSum;
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"grad_division"}));
  EXPECT_THAT(violations[0].message, HasSubstr("divided by 1 in all, but the strategy asks for 2"));
}

TEST_F(Rules, GradDivisionFollowsTheStrategysFactor) {
  Plan plan = test::Fsdp2LikePlan({.units = 1, .sum_reduction = true});
  plan.strategy.fsdp2.gradient_divide_factor = 3.0;
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_division"}));
  for (const test::Spot spot : test::SpotsOf(plan, kGradScale)) test::InstructionAt(plan, spot).divisor = 3.0;
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST_F(Rules, GradDivisionInASumIsOne) {
  Plan plan = test::Fsdp2LikePlan({.units = 1});
  plan.strategy.fsdp2.gradient_divide_factor = 3.0;
  for (const test::Spot spot : test::SpotsOf(plan, kReduceScatter)) {
    test::InstructionAt(plan, spot).divisor = 3.0;
  }
  EXPECT_THAT(RulesOf(plan), Contains("reference"));  // an average divides by itself
  for (const test::Spot spot : test::SpotsOf(plan, kReduceScatter)) {
    test::InstructionAt(plan, spot).reduce_op = ReduceOp::kSum;
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
  test::InstructionAt(plan, Steady(plan, kReduceScatter)[0]).divisor = 1.0;
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_division"}));
}

TEST_F(Rules, GradDivisionInTwoPartsIsOneDivision) {
  // The reduction of fp16: a part before, the rest after.
  Plan plan = test::Fsdp2LikePlan({.units = 1, .shards = 8, .sum_reduction = true});
  for (const test::Spot spot : test::SpotsOf(plan, kGradScale)) test::InstructionAt(plan, spot).divisor = 2.0;
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"grad_division"}));
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
        if (trigger.instructions[i].kind != kReduceScatter) continue;
        Instruction scale = trigger.instructions[i];
        scale.kind = kGradScale;
        scale.divisor = 4.0;
        scale.dst = scale.communicator = -1;
        trigger.instructions.Edit().insert(
            trigger.instructions.Edit().begin() + static_cast<std::ptrdiff_t>(i++), scale);
      }
    }
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
}

// The backward of layers.1 is followed by copies of its gradient through a buffer of no unit into layers.0's.
Plan WithGradientOfAnotherUnit(Plan plan) {
  const BufferId between = static_cast<BufferId>(plan.buffers.size());
  plan.buffers.push_back({.name = "between", .role = BufferRole::kGradSharded, .parts_bytes = {Bytes{64}}});
  const BufferId from = BufferNamed(plan, "layers.1.grad_unsharded");
  const BufferId to = BufferNamed(plan, "layers.0.grad_unsharded");
  const Spot taken = Steady(plan, kGradCopyIn, "layers.1.grad_unsharded")[0];
  std::vector<Instruction>& instructions = plan.steps[taken.step].triggers[taken.trigger].instructions.Edit();
  instructions.insert(instructions.begin() + static_cast<std::ptrdiff_t>(taken.instruction),
                      {{.kind = kAllocate, .stream = 0, .dst = between},
                       {.kind = kAllocate, .stream = 0, .dst = to},
                       {.kind = kCopyToDevice, .stream = 0, .src = from, .dst = between},
                       {.kind = kAllReduce, .stream = 0, .src = between, .communicator = 0},
                       {.kind = kCopyToDevice, .stream = 0, .src = between, .dst = to}});
  return plan;
}

TEST_F(Rules, GradNotReducedWhenItIsAddedToThatOfAnotherUnit) {
  const std::vector<Violation> violations = Verify(WithGradientOfAnotherUnit(good_));
  EXPECT_THAT(RulesOf(violations), Contains("grad_not_reduced"));
  EXPECT_THAT(violations, Contains(::testing::Field(&Violation::message, HasSubstr("not reduced alike"))));
}

}  // namespace
}  // namespace shardplan::test
