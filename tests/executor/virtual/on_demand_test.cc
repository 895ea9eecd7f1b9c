// What is done on demand computes the right numbers, in whatever order the streams run: the procedures of
// every plan that the planner makes, as a program of steps.
#include "shardplan/schemas/on_demand.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 4;
constexpr std::int64_t kSteps = 3;  // the first, one that reduces, one that keeps and reduces

// The model of numbers takes gradients, and units that forwards read, from the trace; on demand every
// parameter that trains gets one, and every unit is read.
bool ReachesEverything(const Plan& plan, const Trace& trace) {
  std::vector<bool> has(trace.parameters.size(), false);
  for (const TraceEvent& event : trace.backwards.front().events) {
    if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) has[grad->parameter] = true;
  }
  const bool all = std::ranges::all_of(plan.units, [&](const Unit& unit) {
    return std::ranges::all_of(unit.parameters, [&](const UnitParameter& own) {
      const auto traced = std::ranges::find(trace.parameters, own.fqn, &Parameter::fqn);
      return !own.requires_grad || traced == trace.parameters.end() || has[traced - trace.parameters.begin()];
    });
  });
  return all && trace.forwards.front().grad_enabled;
}

void Check(const PlanCase& c) {
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  if (!planned) return;
  const Plan& plan = planned->plan;
  EXPECT_FALSE(plan.procedures.empty());
  if (!planned->faults.empty() || c.trace.backwards.empty() || !ReachesEverything(plan, c.trace)) return;
  const OnDemandProgram program = OnDemandProgramOf(plan);
  ASSERT_TRUE(Verify(program.plan).empty());
  const std::int64_t steps = std::min<std::int64_t>(kSteps, std::ssize(program.plan.steps));
  ExpectedValues expected(program.plan, c.trace, steps);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    ASSERT_EQ(RunChecked(program.plan, expected, seed).failure, "") << c.name << ", seed " << seed;
  }
}

class OnDemand : public testing::Test {};

TEST_F(OnDemand, RecordedPlansComputeTheRightNumbers) {
  for (const std::string& name : RecordedNames()) Check(RecordedCase(name));
}
TEST_F(OnDemand, GoldenPlansComputeTheRightNumbers) {
  for (const std::string& name : GoldenNames()) Check(GoldenCase(name));
}
TEST_F(OnDemand, KnobsComputeTheRightNumbers) {
  for (const PlanCase& c : KnobCases()) Check(c);
}
TEST_F(OnDemand, RandomPlansComputeTheRightNumbers) {
  for (std::uint32_t seed = 1; seed <= 40; ++seed) Check(RandomCase(seed));
}

}  // namespace
}  // namespace shardplan::test
