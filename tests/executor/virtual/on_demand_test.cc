// SPDX-License-Identifier: Apache-2.0
// Procedures compute the right numbers, in whatever order the streams run: those of every plan that the
// planner makes, as a program of steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/program.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kOnDemandSeeds = 4;

// The procedures that no step of the program calls.
std::set<std::string> NotCalled(const Plan& plan, const OnDemandProgram& program) {
  std::vector<bool> called(plan.procedures.size(), false);
  for (const std::vector<std::int32_t>& step : program.procedures) {
    for (const std::int32_t procedure : step) {
      if (procedure >= 0) called[static_cast<std::size_t>(procedure)] = true;
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

void Check(const PlanCase& c) {
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  if (!planned) return;
  const Plan& plan = planned->plan;
  EXPECT_FALSE(plan.procedures.empty());
  if (!planned->faults.empty() || !HasNumbersOnDemand(plan, c.trace)) return;
  const OnDemandProgram program = OnDemandProgramOf(plan);
  EXPECT_EQ(NotCalled(plan, program), std::set<std::string>()) << c.name;
  // Procedures are triggers of their own there, which no call of the user passes: rule tables.
  for (const Violation& violation : Verify(program.plan)) {
    ASSERT_EQ(violation.rule, Rule::kTables) << c.name << ": " << violation.message;
  }
  const Plan of_trace = WithPassesOfTrace(program.plan);
  ExpectedValues expected(of_trace, c.trace, OnDemandStepsWithNumbers(program.plan));
  for (std::uint64_t seed = 1; seed <= kOnDemandSeeds; ++seed) {
    ASSERT_EQ(RunChecked(program.plan, expected, seed).failure, "") << c.name << ", seed " << seed;
  }
}

class OnDemand : public ::testing::Test {};

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
