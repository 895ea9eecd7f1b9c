// What is done on demand computes the right numbers, in whatever order the streams run: the procedures of
// every plan that the planner makes, as a program of steps.
#include "shardplan/schemas/on_demand.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 4;

// All but the last where gradients are kept: that those are reduced without another backward is no call of
// any loop.
std::int64_t StepsToRun(const Plan& program) {
  const auto steps = std::ssize(program.steps);
  return program.steps.back().name == "keep" ? steps - 1 : steps;
}

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
  EXPECT_EQ(NotCalled(plan, program), std::set<std::string>()) << c.name;
  ASSERT_TRUE(Verify(program.plan).empty()) << c.name;
  const std::int64_t steps = StepsToRun(program.plan);
  ExpectedValues expected(program.plan, c.trace, steps);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    ASSERT_EQ(RunChecked(program.plan, expected, seed).failure, "") << c.name << ", seed " << seed;
  }
}

// The procedures that no step of the program calls.
std::set<std::string> NotCalled(const Plan& plan, const OnDemandProgram& program) {
  std::vector<bool> called(plan.procedures.size(), false);
  for (const auto& step : program.origins) {
    for (const auto& trigger : step) {
      for (const OnDemandOrigin& origin : trigger) {
        if (origin.procedure >= 0) called[static_cast<std::size_t>(origin.procedure)] = true;
      }
    }
  }
  std::set<std::string> missing;
  for (std::size_t p = 0; p < called.size(); ++p) {
    const Procedure& procedure = plan.procedures[p];
    if (called[p] || procedure.instructions.empty()) continue;
    missing.insert(std::string(Name(procedure.kind)) + " of " + plan.units[procedure.unit].fqn);
  }
  return missing;
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
