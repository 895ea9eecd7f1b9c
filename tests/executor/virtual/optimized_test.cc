// SPDX-License-Identifier: Apache-2.0
// What the optimising planner makes of small models computes the right numbers in whatever order the streams
// run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "shardplan/planner/optimize.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/plan_cases.h"
#include "tests/planner/bound_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kOrders = 1000;  // of each plan

Strategy Accumulating(std::int32_t microbatches) {
  Strategy strategy;
  if (microbatches > 1) strategy.program = {testing::MicrobatchStep(microbatches)};
  return strategy;
}

constexpr std::int64_t kNarrow = 8;
// A budget is tight only where the allocator's segments do not hide the tensors.
constexpr std::int64_t kWide = 2048;

struct OptimizedCase {
  std::uint32_t seed = 0;
  std::string policy;
  std::int32_t microbatches = 1;
  bool replicas = false;
  int percent = 100;  // of what the fastest plan reserves
};

std::string NameOf(const OptimizedCase& what) {
  return fmt::format("{}_{}microbatches{}_{}percent_seed{}", what.policy, what.microbatches,
                     what.replicas ? "_replicas" : "", what.percent, what.seed);
}

void PrintTo(const OptimizedCase& what, std::ostream* out) { *out << NameOf(what); }

Trace ModelOf(std::int64_t width) { return testing::LayeredTrace(4, width, width - 2, 8); }

// The best strategy within so much of what the fastest plan reserves.
Result<OptimizeOutput> Search(const OptimizedCase& what, const Trace& trace, const PlanCase& c) {
  OptimizeOptions options{
      .budget = Bytes{std::int64_t{1} << 40}, .may_checkpoint = true, .time_limit_ns = {0}};
  Result<OptimizeOutput> loose = Optimize(trace, c.strategy, c.cluster, options);
  if (!loose || what.percent == 100) return loose;
  options.budget = Bytes{loose->report.peak_reserved_bytes.value * what.percent / 100};
  Result<OptimizeOutput> tight = Optimize(trace, c.strategy, c.cluster, options);
  if (tight) {
    EXPECT_LE(tight->report.peak_reserved_bytes, options.budget);
    EXPECT_NE(tight->strategy, loose->strategy);
  }
  return tight;
}

// A tight budget's strategy is searched for with wide tensors, and run with narrow ones.
Result<PlanCase> Optimized(const OptimizedCase& what) {
  testing::Random random(what.seed);
  PlanCase c{.name = fmt::format("optimized/{}", what.seed),
             .trace = ModelOf(kNarrow),
             .strategy = Accumulating(what.microbatches),
             .cluster = testing::RandomCluster(random, 4)};
  c.strategy.policy = what.policy;
  c.strategy.mixed_precision =
      MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  if (what.replicas) c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
  Result<OptimizeOutput> output = Search(what, what.percent < 100 ? ModelOf(kWide) : c.trace, c);
  if (!output) return std::unexpected(output.error());
  c.strategy = output->strategy;
  return c;
}

std::vector<OptimizedCase> OptimizedCases() {
  std::vector<OptimizedCase> cases;
  for (const OptimizedCase& what : {OptimizedCase{0, "fsdp2"},
                                    {0, "fsdp1"},
                                    {0, "fsdp2", 3},
                                    {0, "fsdp1", 3},
                                    {0, "fsdp2", 1, true},
                                    {0, "fsdp2", 3, true},
                                    {0, "fsdp2", 1, false, 90},
                                    {0, "fsdp2", 3, false, 90}}) {
    cases.push_back(what);
    cases.back().seed = static_cast<std::uint32_t>(cases.size());
  }
  return cases;
}

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
