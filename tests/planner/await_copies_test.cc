// SPDX-License-Identifier: Apache-2.0
// Offloaded shards are stepped on the host: behind every copy of them, by a wait wherever PyTorch has none,
// and by no wait that is not needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/planned.h"
#include "tests/planner/random_cases.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::Contains;
using testing::LayeredTrace;
using testing::Planned;
using testing::Random;
using testing::RandomCase;
using testing::RandomPlanCase;

const ForwardCall kEvaluation{.microbatch = 1, .trace = 1};
const StepProgram kUsualStep = {ForwardCall{}, BackwardCall{{0}, 0}, OptimizerStepCall{}, ZeroGradCall{}};

Trace WithEvaluation(Trace trace) {
  Pass evaluation = trace.forwards[0];
  evaluation.grad_enabled = false;
  for (Tensor& tensor : evaluation.tensors) tensor.requires_grad = false;
  trace.forwards.push_back(std::move(evaluation));
  return trace;
}

StepProgram Evaluating(std::size_t before_call) {
  StepProgram step = kUsualStep;
  step.insert(step.begin() + static_cast<std::ptrdiff_t>(before_call), kEvaluation);
  return step;
}

bool IsAdded(const Instruction& i) { return i.reason.str() == "host_memory"; }

std::vector<std::string> AddedTo(const Plan& plan) {
  std::vector<std::string> added;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (!IsAdded(i)) continue;
        added.push_back(step.name + ": " + (i.kind == InstructionKind::kRecord ? "record " : "host_wait ") +
                        plan.events[i.event]);
      }
    }
  }
  return added;
}

// Every added wait, taken away alone, is missed by the verifier, which knows nothing of the pass. How many
// there are.
int ExpectEveryWaitIsNeeded(const Plan& plan) {
  int waits = 0;
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    for (std::size_t t = 0; t < plan.steps[s].triggers.size(); ++t) {
      const std::vector<Instruction>& instructions = plan.steps[s].triggers[t].instructions;
      for (std::size_t n = 0; n < instructions.size(); ++n) {
        if (!IsAdded(instructions[n]) || instructions[n].kind != InstructionKind::kHostWait) continue;
        ++waits;
        Plan without = plan;
        std::vector<Instruction>& fewer = without.steps[s].triggers[t].instructions.Edit();
        fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(n));
        const std::vector<Violation> violations = Verify(without);
        EXPECT_TRUE(std::ranges::any_of(violations,
                                        [](const Violation& v) {
                                          return v.rule == Rule::kWriteRace ||
                                                 v.rule == Rule::kReadBeforeWrite;
                                        }))
            << "step " << s << ", trigger " << t << "\n"
            << PlanText(plan);
      }
    }
  }
  return waits;
}

Strategy Offloaded(const std::string& policy, StepProgram step) {
  Strategy strategy{.policy = policy, .units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  strategy.cpu_offload = true;
  strategy.program = {std::move(step)};
  return strategy;
}

TEST(AwaitCopiesTest, AnEvaluationBeforeTheStepIsWaitedForOnceAndNoOtherIs) {
  const Trace trace = WithEvaluation(LayeredTrace(3, 8, 8, 8));
  for (const auto& [policy, stream] : {std::pair("fsdp1", "pre_unshard"), {"fsdp2", "all_gather_copy_in"}}) {
    const std::string event = std::string(" host_memory.") + stream;
    for (std::size_t before = 0; before <= kUsualStep.size(); ++before) {
      if (before == 1) continue;  // between a forward and its backward
      SCOPED_TRACE(std::string(policy) + ", before call " + std::to_string(before));
      const Plan plan = Planned(trace, Offloaded(policy, Evaluating(before)));
      EXPECT_TRUE(plan.known_faults.empty());
      std::vector<std::string> expected;
      for (const PlanStep& step : plan.steps) {
        if (before != 2) continue;
        expected.push_back(step.name + ": record" + event);
        expected.push_back(step.name + ": host_wait" + event);
      }
      EXPECT_EQ(AddedTo(plan), expected);
      ExpectEveryWaitIsNeeded(plan);
    }
    EXPECT_TRUE(AddedTo(Planned(trace, Offloaded(policy, kUsualStep))).empty());
  }
}

TEST(AwaitCopiesTest, AnEvaluationBeforeTheStepLeavesPiecesOfBeforeIt) {
  for (const std::size_t before : {0U, 2U, 3U}) {
    SCOPED_TRACE("before call " + std::to_string(before));
    Strategy strategy = Offloaded("fsdp2", Evaluating(before));
    strategy.reshard_after_forward = 2;
    const Result<PlannerOutput> planned =
        MakePlan(WithEvaluation(LayeredTrace(3, 8, 8, 8)), strategy, ClusterOf(4));
    ASSERT_TRUE(planned) << ToString(planned.error());
    EXPECT_EQ(planned->plan.known_faults.empty(), before != 2);
    for (const KnownFault& fault : planned->plan.known_faults) {
      EXPECT_EQ(fault.fault, PyTorchFault::kFsdp2Outdated);
      EXPECT_EQ(fault.rule, "wrong_value");
    }
  }
}

TEST(AwaitCopiesTest, AStepThatThePlanLeavesToTheUserWaitsToo) {
  for (const char* policy : {"fsdp1", "fsdp2"}) {
    Strategy strategy = Offloaded(policy, Evaluating(2));
    strategy.optimizer.kind = OptimizerKind::kNone;
    const Plan plan = Planned(WithEvaluation(LayeredTrace(3, 8, 8, 8)), strategy);
    EXPECT_EQ(AddedTo(plan).size(), 2 * plan.steps.size()) << policy;
  }
}

// A hook of FSDP2's that steps an offloaded parameter does not wait for its gradient.
TEST(AwaitCopiesTest, AStepInTheBackwardWaitsForTheGradient) {
  Strategy strategy = Offloaded("fsdp2", {ForwardCall{}, BackwardCall{{0}, 0}});
  strategy.optimizer.in_backward = true;
  const Plan plan = Planned(LayeredTrace(3, 8, 8, 8), strategy);
  EXPECT_TRUE(plan.known_faults.empty());
  EXPECT_THAT(AddedTo(plan), Contains("steady: host_wait host_memory.reduce_scatter"));
  ExpectEveryWaitIsNeeded(plan);
}

TEST(AwaitCopiesTest, PlansOfRandomProgramsVerifyAndEveryWaitIsNeeded) {
  int waits = 0, without = 0;
  for (std::uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomPlanCase c = RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
    Random random(seed);
    c.trace = WithEvaluation(std::move(c.trace));
    c.strategy.cpu_offload = true;
    c.strategy.optimizer.muon.reset();  // steps on the device alone
    c.strategy.program = {kUsualStep};
    for (int evaluations = random.Below(3); evaluations > 0; --evaluations) {
      constexpr int kPlaces[] = {0, 2, 3};
      StepProgram& program = c.strategy.program[0];
      program.insert(program.begin() + kPlaces[random.Below(3)], kEvaluation);
    }
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks));
    ASSERT_TRUE(planned) << ToString(planned.error()) << "\n" << ToJson(c.strategy);
    // The step outdates what an evaluation leaves in the smaller mesh's pieces.
    const auto is_outdated = [](const KnownFault& fault) {
      return fault.fault == PyTorchFault::kFsdp2Outdated;
    };
    ASSERT_TRUE(std::ranges::all_of(planned->plan.known_faults, is_outdated)) << ToJson(c.strategy);
    if (!planned->plan.known_faults.empty()) continue;
    const int of_plan = ExpectEveryWaitIsNeeded(planned->plan);
    waits += of_plan;
    without += of_plan == 0 ? 1 : 0;
  }
  EXPECT_GT(waits, 50);
  EXPECT_GT(without, 20);
}

}  // namespace
}  // namespace shardplan
