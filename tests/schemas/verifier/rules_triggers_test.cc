// SPDX-License-Identifier: Apache-2.0
// Rule tables, of triggers: kind, unit, micro-batch and occurrence are what the program passes there.
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
using ::testing::Not;
using Only = std::set<std::string>;

// Two micro-batches; the second reduces.
class Triggers : public Rules {
 protected:
  Triggers() {
    plan_ = Fsdp2LikePlan({.units = 2, .microbatches = 2});
    EXPECT_THAT(Verify(plan_), IsEmpty());
  }
  std::vector<Trigger>& Steady() { return plan_.steps[1].triggers; }
  Trigger& Find(TriggerKind kind, UnitId unit = -1, std::int32_t microbatch = 0) {
    for (Trigger& trigger : Steady()) {
      if (trigger.kind == kind && trigger.unit == unit && trigger.microbatch == microbatch) return trigger;
    }
    ADD_FAILURE() << Name(kind) << " " << unit << " " << microbatch;
    return Steady().front();
  }
  Plan plan_;
};

TEST_F(Triggers, EveryOccurrenceIsCounted) {
  const Plan good = plan_;
  for (std::size_t t = 0; t < Steady().size(); ++t) {
    plan_ = good;
    ++Steady()[t].occurrence;
    EXPECT_EQ(RulesOf(plan_), Only{"tables"}) << t;
    EXPECT_THAT(Verify(plan_)[0].message,
                HasSubstr("its occurrence 1 is not how often it was passed before"));
    EXPECT_EQ(Verify(plan_)[0].trigger, static_cast<std::int32_t>(t));
  }
}

TEST_F(Triggers, EveryMicroBatchIsOfTheCallThatPassesIt) {
  const Plan good = plan_;
  for (std::size_t t = 0; t < Steady().size(); ++t) {
    for (const std::int32_t microbatch : {0, 1, 2}) {
      plan_ = good;
      if (Steady()[t].microbatch == microbatch) continue;
      // The computes stay those of their own micro-batch.
      for (Instruction& i : Steady()[t].instructions.Edit()) {
        if (i.kind == InstructionKind::kCompute) i.microbatch_offset += Steady()[t].microbatch - microbatch;
      }
      Steady()[t].microbatch = microbatch;
      EXPECT_THAT(RulesOf(plan_), Contains("tables")) << t << " of micro-batch " << microbatch;
    }
  }
}

TEST_F(Triggers, EveryKindIsWhatTheProgramPasses) {
  const Plan good = plan_;
  for (std::size_t t = 0; t < Steady().size(); ++t) {
    for (int kind = 0; kind <= static_cast<int>(TriggerKind::kStepEnd); ++kind) {
      plan_ = good;
      if (Steady()[t].kind == static_cast<TriggerKind>(kind)) continue;
      Steady()[t].kind = static_cast<TriggerKind>(kind);
      const std::set<std::string> rules = RulesOf(plan_);
      // A step need not say where it begins and ends.
      const bool is_of_step = good.steps[1].triggers[t].kind == TriggerKind::kStepBegin ||
                              good.steps[1].triggers[t].kind == TriggerKind::kStepEnd;
      if (is_of_step && kind == static_cast<int>(TriggerKind::kLazyInit)) continue;
      EXPECT_THAT(rules, Not(IsEmpty())) << t << ": " << Name(Steady()[t].kind);
    }
  }
}

TEST_F(Triggers, EveryUnitIsTheOneThatIsEnteredOrLeft) {
  const Plan good = plan_;
  for (std::size_t t = 0; t < Steady().size(); ++t) {
    for (const UnitId unit : {-1, 0, 1}) {
      plan_ = good;
      if (Steady()[t].unit == unit) continue;
      Steady()[t].unit = unit;
      EXPECT_THAT(RulesOf(plan_), Contains("tables")) << t << ": " << unit;
    }
  }
}

TEST_F(Triggers, OfAUnitThatDoesNotExistAreNotInterpreted) {
  Find(TriggerKind::kPreForward, 0).unit = 7;
  EXPECT_EQ(RulesOf(plan_), Only{"reference"});
}

// ---- the user's calls ----

TEST_F(Triggers, EveryCallHasItsOwn) {
  plan_.strategy.program[1].emplace_back(ModuleCall{.method = "reshard", .module = "layers.0"});
  EXPECT_EQ(RulesOf(plan_), Only{"tables"});
  EXPECT_THAT(Verify(plan_)[0].message,
              HasSubstr("the end of step steady: no trigger ends reshard of layers.0"));
  std::vector<Trigger>& triggers = Steady();
  const Trigger call = {.kind = TriggerKind::kUserCall, .unit = 0, .microbatch = 1};
  triggers.insert(triggers.end() - 1, call);
  EXPECT_THAT(Verify(plan_), IsEmpty());
  (triggers.end() - 2)->unit = 1;
  EXPECT_EQ(RulesOf(plan_), Only{"tables"});
}

TEST_F(Triggers, StepsOfTheOptimizerInTheBackwardMayHaveNone) {
  const auto is_of_optimizer = [](const Trigger& trigger) {
    return trigger.kind == TriggerKind::kOptimizerStep || trigger.kind == TriggerKind::kZeroGrad;
  };
  plan_.strategy.optimizer.in_backward = true;
  EXPECT_THAT(Verify(plan_), IsEmpty());
  for (PlanStep& step : plan_.steps) std::erase_if(step.triggers, is_of_optimizer);
  EXPECT_THAT(RulesOf(plan_), Not(Contains("tables")));
  plan_.strategy.optimizer.in_backward = false;
  EXPECT_THAT(RulesOf(plan_), Contains("tables"));
}

// A loss in chunks: the backward of a chunk leaves one module of a group whose other modules it does not run.
// It passes the group's post-backward and no end. The call behind it tells where it ends.
TEST_F(Triggers, ABackwardBeforeAnotherOfItsMicroBatchNeedsNoEnd) {
  const auto is_backward = [](const ProgramCall& call) {
    const auto* backward = std::get_if<BackwardCall>(&call);
    return backward != nullptr && backward->microbatches == std::vector<std::int32_t>{1};
  };
  const auto is_first_of_backward = [](const Trigger& trigger) {
    return trigger.kind == TriggerKind::kPreBackward && trigger.microbatch == 1;
  };
  StepProgram& calls = plan_.strategy.program[1];
  const std::ptrdiff_t last = std::ranges::find_if(calls, is_backward) - calls.begin();
  ASSERT_LT(last, std::ssize(calls));
  const ProgramCall chunk = calls[static_cast<std::size_t>(last)];
  calls.insert(calls.begin() + last, ModuleCall{.method = "reshard", .module = "layers.0"});
  ++Find(TriggerKind::kPostBackward, 0, 1).occurrence;
  const std::vector<Trigger> of_chunk = {
      {.kind = TriggerKind::kPostBackward, .unit = 0, .microbatch = 1},
      {.kind = TriggerKind::kUserCall, .unit = 0, .microbatch = 1},
  };
  Steady().insert(std::ranges::find_if(Steady(), is_first_of_backward), of_chunk.begin(), of_chunk.end());

  // The only backward of its micro-batch is behind the call.
  EXPECT_EQ(RulesOf(plan_), Only{"tables"});
  EXPECT_THAT(Verify(plan_)[0].message, HasSubstr("it is passed where reshard of layers.0 is under way"));
  calls.insert(calls.begin() + last, chunk);
  EXPECT_THAT(RulesOf(plan_), Not(Contains("tables")));
  // The last backward of the micro-batch has its end.
  std::erase_if(Steady(), [](const Trigger& trigger) {
    return trigger.kind == TriggerKind::kBackwardEnd && trigger.microbatch == 1;
  });
  EXPECT_THAT(RulesOf(plan_), Contains("tables"));
}

TEST_F(Triggers, OfAPlanThatSaysNoOrderAreNotComparedWithCalls) {
  plan_.passes = {};
  for (Segment& segment : plan_.segments) segment.pass = -1;
  Find(TriggerKind::kZeroGrad, -1, 1).microbatch = 0;
  EXPECT_THAT(Verify(plan_), IsEmpty());
}

}  // namespace
}  // namespace shardplan::test
