// SPDX-License-Identifier: Apache-2.0
// Rules on memory: use_unallocated, use_after_free, double_free, double_allocate, free_before_last_use, leak,
// write_race. Each: a good plan with one mistake, and what is reported. Consequences of a mistake are listed,
// too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/schemas/verifier/rules.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;

// ---- lifetimes ----

TEST_F(Rules, UseUnallocated) {
  const Plan plan = test::Without(good_, Steady(good_, kAllocate, "layers.0.all_gather_output")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"use_unallocated"}));
}

TEST_F(Rules, UseAfterFree) {
  Plan plan = good_;
  const test::Spot copy_out = Steady(plan, kCopyOut, "layers.1.all_gather_output")[0];
  std::vector<Instruction>& list = plan.steps[1].triggers[copy_out.trigger].instructions.Edit();
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(copy_out.instruction),
              {.kind = kFree, .src = BufferNamed(plan, "layers.1.all_gather_output")});
  // ... and the free that was there before comes second.
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"double_free", "use_after_free"}));
}

TEST_F(Rules, UseAfterFreeWhileBound) {
  const test::Spot bind = Steady(good_, kBindSharded, "layers.0.param_sharded")[0];
  const std::vector<Violation> violations = Verify(test::Swapped(good_, bind));
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"use_after_free"}));
  EXPECT_THAT(violations[0].message, HasSubstr("are views of it"));
}

TEST_F(Rules, UseAfterFreeWhileBoundToABufferThatSaysNoUnit) {
  Plan plan = good_;  // the instructions say it, but not what lies where
  Buffer& buffer = plan.buffers[BufferNamed(plan, "layers.0.param_unsharded")];
  buffer.unit = -1;
  buffer.parameters.clear();
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"layout", "wrong_value"}));
  EXPECT_THAT(Remarks(plan), IsEmpty());
  const test::Spot bind = Steady(plan, kBindSharded, "layers.0.param_sharded")[0];
  const std::vector<Violation> violations = Verify(test::Swapped(plan, bind));
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"layout", "use_after_free", "wrong_value"}));
  EXPECT_THAT(violations, Contains(::testing::Field(
                              &Violation::message, HasSubstr("the parameters of layers.0 are views of it"))));
}

TEST_F(Rules, DoubleFree) {
  const Plan plan = test::Doubled(good_, Steady(good_, kFree, "layers.0.reduce_scatter_input")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"double_free"}));
}

TEST_F(Rules, DoubleAllocate) {
  const Plan plan = test::Doubled(good_, Steady(good_, kAllocate, "layers.0.reduce_scatter_input")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"double_allocate"}));
}

TEST_F(Rules, FreeBeforeLastUseWithoutTheWaitOfThePoolsStream) {
  // The reduce-scatter input comes from compute's pool; without compute's wait for the reduce-scatter its
  // block goes to the next tensor of the backward while the reduce-scatter reads it.
  const test::Spot free = Steady(good_, kFree, "layers.1.reduce_scatter_input")[0];
  const Plan plan = test::Without(good_, WaitBefore(good_, free, 0));
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"free_before_last_use"}));
  EXPECT_EQ(violations[0].trigger, static_cast<std::int32_t>(free.trigger));
  EXPECT_EQ(
      test::InstructionAt(plan, {1, free.trigger, static_cast<std::size_t>(violations[0].instruction)}).kind,
      kFree);
}

TEST_F(Rules, FreeBeforeLastUseIsCuredByRecordStream) {
  const test::Spot free = Steady(good_, kFree, "layers.1.reduce_scatter_input")[0];
  Plan plan = good_;
  test::InstructionAt(plan, free).safe_after = {StreamNamed(plan, "reduce_scatter")};
  EXPECT_THAT(Verify(test::Without(plan, WaitBefore(plan, free, 0))), IsEmpty());
  test::InstructionAt(plan, free).safe_after = {StreamNamed(plan, "all_gather_copy_in")};
  EXPECT_EQ(RulesOf(test::Without(plan, WaitBefore(plan, free, 0))),
            (std::set<std::string>{"free_before_last_use"}));
}

TEST_F(Rules, FreeBeforeLastUseIsCuredByAHostWait) {
  const test::Spot free = Steady(good_, kFree, "layers.1.reduce_scatter_input")[0];
  Plan plan = good_;
  Instruction& wait = test::InstructionAt(plan, WaitBefore(plan, free, 0));
  wait.kind = kHostWait;
  wait.stream = -1;
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST_F(Rules, FreeBeforeLastUseWhenAnotherStreamUsesTheBlockFirst) {
  // Allocated on compute, first used on another stream that has not waited: compute's own tensors may be
  // there still.
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kAllocate, "layers.0.all_gather_output")[1]).stream = 0;
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"free_before_last_use"}));
}

TEST_F(Rules, Leak) {
  const Plan plan = test::Without(good_, Steady(good_, kFree, "layers.0.reduce_scatter_input")[0]);
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"leak"}));
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_THAT(violations[0].chain, ElementsAre(HasSubstr("allocate layers.0.reduce_scatter_input")));
}

TEST_F(Rules, LeakOfSomethingThatOnlyTheFirstStepMakes) {
  Plan plan = good_;
  plan.buffers.push_back({.name = "forgotten", .role = BufferRole::kOptimizerTemp});
  plan.steps[0].triggers[0].instructions.Edit().push_back(
      {.kind = kAllocate, .stream = 0, .dst = static_cast<BufferId>(plan.buffers.size()) - 1});
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"leak"}));
}

// ---- write_race ----

TEST_F(Rules, WriteRaceWhenTheOptimizerOvertakesAWastedPrefetch) {
  // A unit is gathered once more than it is used; the optimizer must not write the shard while that reads it.
  const auto build = [](bool waits) {
    test::PlanBuilder b;
    const StreamId gather = b.Stream("all_gather");
    const UnitId unit = b.Unit("u");
    const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
    const BufferId output = b.Buffer(BufferRole::kAllGatherOutput, unit);
    const BufferId grad = b.Buffer(BufferRole::kGradUnsharded, unit);
    const BufferId input = b.Buffer(BufferRole::kReduceScatterInput, unit);
    const BufferId reduced = b.Buffer(BufferRole::kGradSharded, unit);
    const SegmentId backward = b.Backward("backward", {}, {{unit, 0}});
    b.Step("only").At(TriggerKind::kPreBackward, unit).Sync(0, gather);
    b.Allocate(output, gather).CopyIn(shard, output, gather).AllGather(output, output, gather).Free(output);
    b.Compute(backward).Allocate(input, 0).Move(kGradCopyIn, grad, input, 0).Free(grad);
    b.Allocate(reduced, 0).ReduceScatter(input, reduced, 0).Free(input);
    if (waits) b.Sync(gather, 0);
    b.At(TriggerKind::kOptimizerStep).OptimizerStep(0).At(TriggerKind::kZeroGrad).ZeroGrad();
    return b.plan();
  };
  EXPECT_THAT(Verify(build(true)), IsEmpty());
  const Plan plan = build(false);
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"write_race"}));
  EXPECT_THAT(violations[0].message, HasSubstr("optimizer_step"));
  EXPECT_THAT(violations[0].message, HasSubstr("u.param_sharded"));
}

TEST_F(Rules, WriteRaceWhenAGradientIsScaledWhileItIsReduced) {
  Plan plan = test::Fsdp2LikePlan({.units = 2, .replicas = 2, .sum_reduction = true});
  for (const test::Spot spot : Steady(plan, kGradScale)) test::InstructionAt(plan, spot).stream = 0;
  EXPECT_THAT(RulesOf(plan), Contains("read_before_write"));
  EXPECT_THAT(RulesOf(plan), Contains("write_race"));
}

TEST_F(Rules, WriteRaceWhenACopyInOverwritesWhatIsStillRead) {
  // One all-gather output for good, never freed: the next copy-in has to wait for the last copy-out.
  const auto build = [](bool waits) {
    test::PlanBuilder b;
    const StreamId gather = b.Stream("all_gather");
    const UnitId unit = b.Unit("u");
    const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
    const BufferId output = b.Buffer(BufferRole::kAllGatherOutput, unit);
    const BufferId unsharded = b.Buffer(BufferRole::kParamUnsharded, unit);
    b.plan().buffers[output].persistent = true;
    b.Step("only").At(TriggerKind::kPreForward, unit);
    b.CopyIn(shard, output, gather).AllGather(output, output, gather).Sync(gather, 0);
    b.Allocate(unsharded, 0).CopyOut(output, unsharded, 0).Free(unsharded);
    if (waits) b.Sync(0, gather);
    return b.plan();
  };
  EXPECT_THAT(Verify(build(true)), IsEmpty());
  EXPECT_THAT(RulesOf(build(false)), Contains("write_race"));
}

}  // namespace
}  // namespace shardplan::test
