// SPDX-License-Identifier: Apache-2.0
// Rules on order: wait_before_record, deadlock, and steady_state, what goes round. Each: a good plan with one
// mistake, and what is reported. Consequences of a mistake are listed, too.
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
using ::testing::IsEmpty;
using enum InstructionKind;

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
  plan.steps[1].triggers.back().instructions.Edit().push_back(
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
    std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
      return i.kind == kAllocate && plan.buffers[i.dst].role == BufferRole::kOptimizerState;
    });
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
  const test::Spot wait = test::SpotsOf(plan, kWait)[0];
  EXPECT_EQ(RulesOf(test::Without(plan, wait)), (std::set<std::string>{"read_before_write"}));
}

}  // namespace
}  // namespace shardplan::test
