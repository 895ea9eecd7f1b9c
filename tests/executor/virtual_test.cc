// The conformance cases on the virtual machine, under many seeds, and that it finds what is wrong with a
// plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"
#include "tests/executor/sharded_plan.h"
#include "tests/executor/virtual_runner.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 40;
constexpr std::int64_t kSteps = 2;

class VirtualConformance : public testing::TestWithParam<ShardedPlanOptions> {};

std::string CaseName(const testing::TestParamInfo<ShardedPlanOptions>& info) { return ToString(info.param); }

// The first of the seeds under which the run goes wrong, with what; "" when all go well.
std::string FirstFailure(const Plan& plan, std::uint64_t seeds, std::int64_t steps) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const std::string failure = RunOnVirtual(plan, seed, steps);
    if (!failure.empty()) return "seed " + std::to_string(seed) + ": " + failure;
  }
  return {};
}

TEST_P(VirtualConformance, ParametersAreExactUnderEverySeed) {
  const Plan plan = MakeShardedPlan(GetParam());
  EXPECT_EQ(FirstFailure(plan, kSeeds, kSteps), "");
}

TEST_P(VirtualConformance, TheVerifierAgrees) {
  const Plan plan = MakeShardedPlan(GetParam());
  std::vector<std::string> violations;
  for (const Violation& violation : Verify(plan)) violations.push_back(Explain(plan, violation));
  EXPECT_THAT(violations, testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(Cases, VirtualConformance, testing::ValuesIn(ConformanceCases()), CaseName);

}  // namespace
}  // namespace shardplan::test
