// SPDX-License-Identifier: Apache-2.0
// Plans that the optimising planner makes of small models compute the right numbers in whatever order the
// streams run.
#include <gtest/gtest.h>

#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/optimized_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kOrders = 1000;  // of each plan

class OptimizedPlans : public ::testing::TestWithParam<OptimizedCase> {};

TEST_P(OptimizedPlans, ComputeTheRightNumbersInWhateverOrder) {
  const Result<PlanCase> c = Optimized(GetParam());
  ASSERT_TRUE(c.has_value()) << ToString(c.error());
  const Result<PlannerOutput> planned = MakePlan(c->trace, c->strategy, c->cluster);
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  ExpectedValues expected(planned->plan, c->trace,
                          std::max<std::int64_t>(c->steps, std::ssize(planned->plan.steps) + 1));
  for (std::uint64_t order = 1; order <= kOrders; ++order) {
    const Findings findings = RunChecked(planned->plan, expected, order);
    ASSERT_EQ(WhatIsWrong(*c, {}, findings), "") << c->name << ", seed " << order;
  }
}

INSTANTIATE_TEST_SUITE_P(Virtual, OptimizedPlans, ::testing::ValuesIn(OptimizedCases()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace shardplan::test
