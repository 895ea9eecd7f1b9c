// SPDX-License-Identifier: Apache-2.0
// The chain of causes of a step, and what two steps differ by.
#include "shardplan/simulator/critical_path.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "shardplan/simulator/cost_model.h"
#include "tests/simulator/layered_plan.h"
#include "tests/simulator/random_plan.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kPathSeeds = 400;

EngineProgram Lowered(const Plan& plan) {
  Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  EXPECT_TRUE(program.has_value()) << ToString(program.error());
  return program ? *std::move(program) : EngineProgram{};
}

CriticalPath PathOf(const Plan& plan) {
  Result<CriticalPath> path = FindCriticalPath(plan, Lowered(plan));
  EXPECT_TRUE(path.has_value()) << ToString(path.error());
  return path ? *std::move(path) : CriticalPath{};
}

Nanoseconds Of(const CriticalPath& path, TimeCause cause) {
  return SumByCause(path)[static_cast<std::size_t>(cause)];
}

// A random plan on a machine with every mechanism: host costs, slowing, several operators a segment.
Plan HardPlan(std::uint64_t seed) {
  Plan plan = RandomPlan(seed);
  plan.cluster.host.operator_issue_ns = {static_cast<std::int64_t>(seed % 7) * 300};
  plan.cluster.host.event_ns = {static_cast<std::int64_t>(seed % 5) * 100};
  plan.cluster.host.runs_kernels = seed % 6 == 1;
  plan.cluster.host.copy_issue_ns = {static_cast<std::int64_t>(seed % 3) * 700};
  plan.cluster.compute_rate_while_communicating_ppm =
      1'000'000 - static_cast<std::int64_t>(seed % 4) * 90'000;
  plan.cluster.communication_rate_while_computing_ppm =
      1'000'000 - static_cast<std::int64_t>(seed % 3) * 70'000;
  return plan;
}

TEST(CriticalPath, PartsFollowEachOtherAndAddUpToTheStep) {
  for (std::uint64_t seed = 1; seed <= kPathSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = HardPlan(seed);
    const EngineProgram program = Lowered(plan);
    const Result<CriticalPath> path = FindCriticalPath(plan, program);
    ASSERT_TRUE(path.has_value());
    const Result<EngineResult> run =
        RunStep(program, static_cast<std::int32_t>(program.steps.size()) - 1, nullptr);
    ASSERT_EQ(path->step_ns, run->end_ns);
    Nanoseconds sum;
    for (const PathPart& part : path->parts) {
      ASSERT_GT(part.duration_ns.value, 0);
      sum += part.duration_ns;
    }
    ASSERT_EQ(sum, path->step_ns);
  }
}

// Work on the path is as long as the step, so a step in which all of it costs nothing is shorter. Exceptions
// are equally long paths beside it, and work that moves to where it is slower.
TEST(CriticalPath, WithoutWhatIsOnItTheStepIsShorter) {
  int tried = 0;
  int shorter = 0;
  for (std::uint64_t seed = 1; seed <= kPathSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = HardPlan(seed);
    EngineProgram program = Lowered(plan);
    const Result<CriticalPath> path = FindCriticalPath(plan, program);
    ASSERT_TRUE(path.has_value());
    EngineStep& step = program.steps.back();
    Nanoseconds removed;
    for (std::size_t i = 0; i < step.code.size(); ++i) {
      const bool on_path = std::ranges::any_of(path->parts, [&](const PathPart& part) {
        return part.cause != TimeCause::kHostIssue && part.at.trigger == step.origins[i].trigger &&
               part.at.instruction == step.origins[i].instruction;
      });
      if (!on_path || step.code[i].op != EngineOp::kWork) continue;
      removed += step.code[i].duration_ns;
      step.code[i].duration_ns = {};
    }
    if (removed.value == 0) continue;
    ++tried;
    const Result<EngineResult> run =
        RunStep(program, static_cast<std::int32_t>(program.steps.size()) - 1, nullptr);
    ASSERT_TRUE(run.has_value());
    shorter += run->end_ns < path->step_ns ? 1 : 0;
  }
  EXPECT_GT(tried, 100);
  EXPECT_GT(shorter, tried * 9 / 10);
}

// F = 25, B = 50, C = 10 (closed_forms_test.cc): the first gather and the last scatter are exposed, the rest
// is the model's.
TEST(CriticalPath, OfTheDefaultScheduleIsTheModelAndTwoCollectives) {
  const CriticalPath path = PathOf(LayeredPlan({}));
  EXPECT_EQ(Of(path, TimeCause::kForward).value, 75 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kBackward).value, 150 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kAllGather).value, 10 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kReduceScatter).value, 10 * kMillisecond);
  EXPECT_EQ(path.step_ns.value, 245 * kMillisecond);
}

// Collectives of 60 ms with F = 25: forward and backward are as long as their gathers and scatters.
TEST(CriticalPath, OfLongCollectivesIsTheCommunicator) {
  const CriticalPath path = PathOf(LayeredPlan({.collective_ns = 60 * kMillisecond}));
  const Nanoseconds communication = Of(path, TimeCause::kAllGather) + Of(path, TimeCause::kReduceScatter);
  EXPECT_GE(communication.value, 8 * 60 * kMillisecond);
}

// A host that takes 40 ms for each operator of 25 and 50 ms: n operators are issued one after the other, the
// forwards run at the host's pace. Step: 3 x 40 issue the forwards, the backward's first is issued at 160,
// when forward 3 (120 .. 145) is done; 160 + 50 + 50 + 50 and the last scatter of 10.
TEST(CriticalPath, OfASlowHostIsTheHost) {
  Plan plan = LayeredPlan({});
  plan.cluster.host.operator_issue_ns = {40 * kMillisecond};
  const CriticalPath path = PathOf(plan);
  EXPECT_EQ(path.step_ns.value, 320 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kHostIssue).value, 160 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kBackward).value, 150 * kMillisecond);
}

// Kernels at half their rate under collectives: what a kernel on the path takes longer than alone is the
// slowing.
TEST(CriticalPath, SlowingIsApart) {
  Plan plan = LayeredPlan({});
  plan.cluster.compute_rate_while_communicating_ppm = 500'000;
  const CriticalPath path = PathOf(plan);
  const Nanoseconds model = Of(path, TimeCause::kForward) + Of(path, TimeCause::kBackward);
  EXPECT_EQ(model.value, 225 * kMillisecond);
  EXPECT_EQ(Of(path, TimeCause::kKernelsSlowed).value, path.step_ns.value - 245 * kMillisecond);
  EXPECT_GT(path.step_ns.value, 245 * kMillisecond);
}

const WhatIf* Without(const std::vector<WhatIf>& trials, std::string_view words) {
  const auto found = std::ranges::find(trials, words, &WhatIf::without);
  return found == trials.end() ? nullptr : &*found;
}

// Without the wait for the first gather the forward begins at 0: 10 ms less. No other wait stands.
TEST(WhatIf, TheFirstWaitIsTheExposedGather) {
  const Plan plan = LayeredPlan({});
  const Result<std::vector<WhatIf>> trials = WithoutEach(plan, Lowered(plan));
  ASSERT_TRUE(trials.has_value());
  const WhatIf* first = Without(*trials, "the wait for all_gather layers.0 in the forward");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->step_ns.value, 235 * kMillisecond);
  EXPECT_EQ(first->knob, "forward_prefetch");
  const WhatIf* scatters = Without(*trials, "the time of reduce_scatters");
  ASSERT_NE(scatters, nullptr);
  EXPECT_EQ(scatters->step_ns.value, 235 * kMillisecond);
  EXPECT_EQ(Without(*trials, "the wait for all_gather layers.1 in the forward"), nullptr);
  EXPECT_TRUE(std::ranges::is_sorted(*trials, {}, &WhatIf::step_ns));
}

// The iterations of a matrix optimizer are a segment of 30 ms behind the step.
TEST(WhatIf, TheOptimizerHasItsSegments) {
  Plan plan = LayeredPlan({});
  const auto segment = static_cast<SegmentId>(plan.segments.size());
  plan.segments.push_back(
      {.name = "muon", .phase = SegmentPhase::kOptimizer, .entries = {FixedOperator(30 * kMillisecond)}});
  plan.steps.back().triggers.push_back({.kind = TriggerKind::kOptimizerStep});
  plan.steps.back().triggers.back().instructions.Edit().push_back(
      {.kind = InstructionKind::kCompute, .stream = 0, .segment = segment});
  const Nanoseconds step_ns = PathOf(plan).step_ns;
  const Result<std::vector<WhatIf>> trials = WithoutEach(plan, Lowered(plan));
  ASSERT_TRUE(trials.has_value());
  const WhatIf* optimizer = Without(*trials, "the time of the optimizer");
  ASSERT_NE(optimizer, nullptr);
  EXPECT_EQ(optimizer->step_ns, PathOf(LayeredPlan({})).step_ns);
  EXPECT_GT(step_ns, optimizer->step_ns);
}

std::int64_t SumOf(const std::vector<Difference>& causes, std::int64_t Difference::*side) {
  std::int64_t sum = 0;
  for (const Difference& cause : causes) sum += cause.*side;
  return sum;
}

TEST(CompareSteps, CausesAddUpToTheDifference) {
  for (std::uint64_t seed = 1; seed <= kPathSeeds; ++seed) {
    SCOPED_TRACE("seeds " + std::to_string(seed) + " and " + std::to_string(seed + 1000));
    const Plan a = HardPlan(seed);
    const Plan b = HardPlan(seed + 1000);
    const Result<Comparison> made = CompareSteps(a, b);
    ASSERT_TRUE(made.has_value());
    ASSERT_EQ(SumOf(made->time_ns, &Difference::a), made->step_a_ns.value);
    ASSERT_EQ(SumOf(made->time_ns, &Difference::b), made->step_b_ns.value);
    ASSERT_EQ(SumOf(made->memory_bytes, &Difference::a), made->memory_a_bytes.value);
    ASSERT_EQ(SumOf(made->memory_bytes, &Difference::b), made->memory_b_bytes.value);
  }
}

// Kept gathered, nothing is gathered in the backward; the first gather is still exposed. The step is the
// same, so no cause differs.
TEST(CompareSteps, EqualStepsHaveEqualCauses) {
  const Result<Comparison> made =
      CompareSteps(LayeredPlan({}), LayeredPlan({.reshard_after_forward = false}));
  ASSERT_TRUE(made.has_value());
  for (const Difference& cause : made->time_ns) EXPECT_EQ(cause.a, cause.b) << cause.cause;
}

TEST(CompareSteps, NamesWhatDiffers) {
  const Result<Comparison> made =
      CompareSteps(LayeredPlan({}), LayeredPlan({.forward_ns = 30 * kMillisecond}));
  ASSERT_TRUE(made.has_value());
  for (const Difference& cause : made->time_ns)
    EXPECT_EQ(cause.b - cause.a, cause.cause == "forward" ? 15 * kMillisecond : 0) << cause.cause;
}

}  // namespace
}  // namespace shardplan::test
