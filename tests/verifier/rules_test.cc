// Each rule: a good plan with one mistake, and what is reported. Where a mistake has consequences, they are
// listed too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/verifier.h"
#include "tests/support/plan_builder.h"
#include "tests/support/small_plans.h"
#include "tests/verifier/mutations.h"

namespace shardplan {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;

std::set<std::string> RulesOf(const std::vector<Violation>& violations) {
  std::set<std::string> rules;
  for (const Violation& v : violations) rules.emplace(Name(v.rule));
  return rules;
}
std::set<std::string> RulesOf(const Plan& plan) { return RulesOf(Verify(plan)); }

BufferId BufferNamed(const Plan& plan, const std::string& name) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].name == name) return static_cast<BufferId>(b);
  }
  ADD_FAILURE() << "no buffer " << name;
  return -1;
}
StreamId StreamNamed(const Plan& plan, const std::string& name) {
  for (std::size_t s = 0; s < plan.streams.size(); ++s) {
    if (plan.streams[s].name == name) return static_cast<StreamId>(s);
  }
  ADD_FAILURE() << "no stream " << name;
  return -1;
}

// The spots in the steady step of the instructions of one kind that name a buffer (as src or dst).
std::vector<test::Spot> Steady(const Plan& plan, InstructionKind kind, const std::string& buffer = "") {
  std::vector<test::Spot> spots = test::SpotsOf(plan, kind);
  std::erase_if(spots, [&](test::Spot spot) {
    if (spot.step != 1) return true;
    if (buffer.empty()) return false;
    const Instruction& i = test::InstructionAt(plan, spot);
    const BufferId id = BufferNamed(plan, buffer);
    return i.src != id && i.dst != id;
  });
  EXPECT_FALSE(spots.empty()) << Name(kind) << " " << buffer;
  return spots;
}

// The wait of `stream` that follows the spot soonest / that precedes it last.
test::Spot WaitBefore(const Plan& plan, test::Spot spot, StreamId stream) {
  test::Spot found = spot;
  for (const test::Spot s : test::SpotsOf(plan, kWait)) {
    const bool before =
        s.step == spot.step &&
        (s.trigger < spot.trigger || (s.trigger == spot.trigger && s.instruction < spot.instruction));
    if (before && test::InstructionAt(plan, s).stream == stream) found = s;
  }
  EXPECT_TRUE(found.trigger != spot.trigger || found.instruction != spot.instruction);
  return found;
}

class Rules : public ::testing::Test {
 protected:
  Plan good_ = test::Fsdp2LikePlan({.units = 2});
  Plan hsdp_ = test::Fsdp2LikePlan({.units = 2, .replicas = 2});
};

TEST_F(Rules, GoodPlansHaveNoViolation) {
  EXPECT_THAT(Verify(good_), IsEmpty());
  EXPECT_THAT(Verify(hsdp_), IsEmpty());
}

// ---- reference ----

TEST_F(Rules, ReferenceIdOutOfRange) {
  for (const int which : {0, 1, 2, 3, 4, 5}) {
    Plan plan = good_;
    Instruction& i = test::InstructionAt(plan, Steady(plan, kAllGather)[0]);
    (which == 0   ? i.src
     : which == 1 ? i.dst
     : which == 2 ? i.stream
     : which == 3 ? i.communicator
     : which == 4 ? i.unit
                  : i.event) = 1000;
    EXPECT_THAT(RulesOf(plan), Contains("reference")) << which;
  }
}

TEST_F(Rules, ReferenceRoleThatMakesNoSense) {
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kReduceScatter)[0]).src =
      BufferNamed(plan, "layers.0.param_sharded");
  EXPECT_THAT(RulesOf(plan), Contains("reference"));
}

TEST_F(Rules, ReferenceBuffersOfDifferentUnits) {
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kCopyOut, "layers.0.param_unsharded")[0]).dst =
      BufferNamed(plan, "layers.1.param_unsharded");
  EXPECT_THAT(RulesOf(plan), Contains("reference"));
}

TEST_F(Rules, ReferenceInTheTables) {
  const auto rules_after = [&](auto&& change) {
    Plan plan = good_;
    change(plan);
    return RulesOf(plan);
  };
  using Only = std::set<std::string>;
  const Only reference = {"reference"};
  EXPECT_EQ(rules_after([](Plan& p) { p.units[0].shard_communicator = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.buffers[0].unit = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.buffers[0].parameters = {7}; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.segments[0].reads = {-1}; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.segments[1].grads[0].parameter = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.steady_step = 2; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.communicators[0].size = 0; }), reference);
}

// ---- use_before_unshard ----

TEST_F(Rules, UseBeforeUnshardWhenNotBound) {
  const Plan plan = test::Without(good_, Steady(good_, kBindUnsharded, "layers.0.param_unsharded")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"use_before_unshard"}));
}

TEST_F(Rules, UseBeforeUnshardWhenBoundBeforeTheCopyOut) {
  const test::Spot copy_out = Steady(good_, kCopyOut, "layers.0.param_unsharded")[0];
  EXPECT_EQ(RulesOf(test::Swapped(good_, copy_out)), (std::set<std::string>{"use_before_unshard"}));
}

TEST_F(Rules, UseBeforeUnshardWhenTheComputeStreamHasNotWaited) {
  // The copy-out on another stream, which waits for all it needs; nobody waits for it.
  Plan plan = good_;
  const StreamId gather = StreamNamed(plan, "all_gather");
  const test::Spot spot = Steady(plan, kCopyOut, "layers.0.param_unsharded")[0];
  test::InstructionAt(plan, spot).stream = gather;
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_THAT(RulesOf(violations), Contains("use_before_unshard"));
  EXPECT_THAT(Explain(plan, violations[0]), HasSubstr("stream all_gather"));
}

// ---- read_before_write ----

TEST_F(Rules, ReadBeforeWriteWithoutTheWaitForTheAllGather) {
  const test::Spot copy_out = Steady(good_, kCopyOut, "layers.0.all_gather_output")[0];
  const Plan plan = test::Without(good_, WaitBefore(good_, copy_out, 0));
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"read_before_write"}));
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].step, 1);
  EXPECT_EQ(violations[0].trigger, static_cast<std::int32_t>(copy_out.trigger));
  // Removing the wait moved it one up.
  EXPECT_EQ(violations[0].instruction, static_cast<std::int32_t>(copy_out.instruction) - 1);
}

TEST_F(Rules, ReadBeforeWriteWithoutTheAllGather) {
  const Plan plan = test::Without(good_, Steady(good_, kAllGather, "layers.0.all_gather_output")[0]);
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"read_before_write"}));
  EXPECT_THAT(violations[0].message, HasSubstr("holds only this rank's part"));
}

TEST_F(Rules, ReadBeforeWriteWhenTheNextStepDoesNotWaitForTheOptimizer) {
  // The first trigger of the forward makes the gathering streams wait for compute, hence for the optimizer.
  const test::Spot copy_in = Steady(good_, kCopyIn, "layers.0.param_sharded")[0];
  const Plan plan =
      test::Without(good_, WaitBefore(good_, copy_in, StreamNamed(good_, "all_gather_copy_in")));
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"read_before_write"}));
}

// ---- lifetimes ----

TEST_F(Rules, UseUnallocated) {
  const Plan plan = test::Without(good_, Steady(good_, kAllocate, "layers.0.all_gather_output")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"use_unallocated"}));
}

TEST_F(Rules, UseAfterFree) {
  Plan plan = good_;
  const test::Spot copy_out = Steady(plan, kCopyOut, "layers.1.all_gather_output")[0];
  std::vector<Instruction>& list = plan.steps[1].triggers[copy_out.trigger].instructions;
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
  plan.steps[0].triggers[0].instructions.push_back(
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
    const SegmentId backward = b.Segment("backward", {}, {{unit, 0}});
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

// ---- gradients ----

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
      step.triggers[t].instructions.insert(step.triggers[t].instructions.begin(),
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
  // As fp16 is reduced: a part before, the rest after.
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
        trigger.instructions.insert(trigger.instructions.begin() + static_cast<std::ptrdiff_t>(i++), scale);
      }
    }
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
}

// ---- waits ----

TEST_F(Rules, WaitBeforeRecord) {
  Plan plan = good_;
  plan.events.push_back("never");
  const test::Spot wait = Steady(plan, kWait)[0];
  test::InstructionAt(plan, wait).event = static_cast<EventId>(plan.events.size()) - 1;
  EXPECT_THAT(RulesOf(plan), Contains("wait_before_record"));
}

TEST_F(Rules, DeadlockOfTheHostBehindAWaitForNothing) {
  test::PlanBuilder b;
  const EventId never = b.Event("never");
  const EventId behind = b.Event("behind");
  b.Step("only").At(TriggerKind::kStepBegin).Wait(0, never).Record(behind, 0).HostWait(behind);
  EXPECT_EQ(RulesOf(b.plan()), (std::set<std::string>{"deadlock", "wait_before_record"}));
}

TEST_F(Rules, WaitRefersToTheLatestRecord) {
  // The event is recorded again before the all-gather is issued anew: the old record does not cover the new
  // gather.
  const test::Spot copy_out = Steady(good_, kCopyOut, "layers.0.all_gather_output")[0];
  const test::Spot wait = WaitBefore(good_, copy_out, 0);
  const EventId event = test::InstructionAt(good_, wait).event;
  Plan plan = good_;
  for (const test::Spot spot : Steady(plan, kRecord)) {
    if (test::InstructionAt(plan, spot).event == event) {
      plan = test::Without(plan, spot);
      break;
    }
  }
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"read_before_write"}));
}

// ---- steady_state ----

TEST_F(Rules, SteadyStateWhenAUnitStaysUnsharded) {
  Plan plan = good_;
  const auto in_backward = Steady(plan, kBindSharded, "layers.0.param_sharded").back();
  plan = test::Without(plan, in_backward);  // the bind
  plan = test::Without(plan, in_backward);  // the free behind it
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"leak", "steady_state"}));
}

TEST_F(Rules, SteadyStateWhenGradientsAreNeverZeroed) {
  Plan plan = good_;
  for (int step = 1; step >= 0; --step) {
    for (const test::Spot spot : test::SpotsOf(plan, kZeroGrad)) {
      if (static_cast<int>(spot.step) == step) plan = test::Without(plan, spot);
    }
  }
  EXPECT_FALSE(Verify(plan).empty());
}

TEST_F(Rules, SteadyStateWhenAPersistentBufferIsFreed) {
  Plan plan = good_;
  plan.steps[1].triggers.back().instructions.push_back(
      {.kind = kFree, .src = BufferNamed(plan, "layers.0.param_sharded")});
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"steady_state"}));
}

TEST_F(Rules, TheSteadyStepIsFollowedRound) {
  // One step only: that its first copy-in must wait for the optimizer shows when it comes round.
  Plan plan = good_;
  plan.steps.pop_back();
  plan.steady_step = 0;
  for (Buffer& buffer : plan.buffers) buffer.persistent |= buffer.role == BufferRole::kOptimizerState;
  for (Trigger& trigger : plan.steps[0].triggers) {
    std::erase_if(trigger.instructions, [&](const Instruction& i) {
      return i.kind == kAllocate && plan.buffers[i.dst].role == BufferRole::kOptimizerState;
    });
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
  const test::Spot wait = test::SpotsOf(plan, kWait)[0];
  EXPECT_EQ(RulesOf(test::Without(plan, wait)), (std::set<std::string>{"read_before_write"}));
}

}  // namespace
}  // namespace shardplan
