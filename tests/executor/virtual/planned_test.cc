// SPDX-License-Identifier: Apache-2.0
// Plans of every recording of PyTorch, of every knob and of random models compute the right numbers in
// whatever order the streams run. Cases that PyTorch itself gets wrong are named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include "shardplan/planner/planner.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 4;  // more: virtual_soak
constexpr std::uint32_t kRandomCases = 80;

// Runs the case under some seeds: all right, and stale parameters are read where the verifier says so.
void Check(const PlanCase& c, std::uint64_t seeds) {
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_EQ(planned.has_value(), !RefusedByPyTorch().contains(c.name))
      << (planned ? "" : ToString(planned.error()));
  if (!planned) return;
  const Plan& plan = planned->plan;
  ExpectedValues expected(plan, c.trace, std::max<std::int64_t>(c.steps, std::ssize(plan.steps) + 1));
  const auto wrong = WrongInPyTorch().find(c.name);
  if (wrong != WrongInPyTorch().end()) {
    EXPECT_FALSE(Verify(plan).empty());
    std::string failure;
    for (std::uint64_t seed = 1; seed <= seeds && failure.empty(); ++seed) {
      failure = RunChecked(plan, expected, seed).failure;
    }
    EXPECT_THAT(failure, ::testing::HasSubstr(wrong->second));
    return;
  }
  // A fault of PyTorch that the planner names (else there would be no plan) may show in the numbers or not.
  const bool faulty = !Verify(plan).empty();
  const std::set<std::string> remarked = StaleUnits(plan);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const Findings findings = RunChecked(plan, expected, seed);
    if (faulty) continue;
    ASSERT_EQ(WhatIsWrong(c, remarked, findings), "") << c.name << ", seed " << seed;
  }
}

std::string TestName(std::string name) {
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
}

class RecordedPlans : public ::testing::TestWithParam<std::string> {};
TEST_P(RecordedPlans, ComputeTheRightNumbers) { Check(RecordedCase(GetParam()), kSeeds); }
INSTANTIATE_TEST_SUITE_P(Virtual, RecordedPlans, ::testing::ValuesIn(RecordedNames()),
                         [](const auto& info) { return TestName(info.param); });

class GoldenPlans : public ::testing::TestWithParam<std::string> {};
TEST_P(GoldenPlans, ComputeTheRightNumbers) { Check(GoldenCase(GetParam()), kSeeds); }
INSTANTIATE_TEST_SUITE_P(Virtual, GoldenPlans, ::testing::ValuesIn(GoldenNames()),
                         [](const auto& info) { return TestName(info.param.substr(7)); });

class KnobPlans : public ::testing::TestWithParam<PlanCase> {};
TEST_P(KnobPlans, ComputeTheRightNumbers) { Check(GetParam(), kSeeds); }
INSTANTIATE_TEST_SUITE_P(Virtual, KnobPlans, ::testing::ValuesIn(KnobCases()),
                         [](const auto& info) { return TestName(info.param.name.substr(5)); });

TEST(RandomPlans, ComputeTheRightNumbers) {
  for (std::uint32_t seed = 0; seed < kRandomCases; ++seed) Check(RandomCase(seed), 4);
}

// The checks can fail: one wrong number in a shard.
TEST(CheckedRun, AWrongNumberIsFound) {
  const PlanCase c = RecordedCase("fsdp2/mlp3_default_w2");
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned);
  Plan other = planned->plan;
  for (Trigger& trigger : other.steps[0].triggers) {
    for (Instruction& instruction : trigger.instructions.Edit()) {
      if (instruction.kind == InstructionKind::kReduceScatter) instruction.reduce_op = ReduceOp::kSum;
    }
  }
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  EXPECT_THAT(RunChecked(other, expected, 1).failure, ::testing::HasSubstr("optimizer step: element "));
}

}  // namespace
}  // namespace shardplan::test
