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

constexpr std::uint64_t kOrders = 1000;  // in all

Strategy Accumulating(std::int32_t microbatches) {
  Strategy strategy;
  if (microbatches < 2) return strategy;
  StepProgram step;
  for (std::int32_t m = 0; m < microbatches; ++m) {
    step.push_back(ForwardCall{m, 0});
    step.push_back(BackwardCall{{m}, 0});
  }
  step.push_back(OptimizerStepCall{});
  step.push_back(ZeroGradCall{});
  strategy.program = {step};
  return strategy;
}

struct OptimizedCase {
  std::string policy;
  std::int32_t microbatches = 1;
  bool replicas = false;
  int percent = 100;  // of what the fastest plan reserves
};

// None: there is no plan in that budget.
std::optional<PlanCase> Optimized(const OptimizedCase& what, std::uint32_t seed) {
  testing::Random random(seed);
  PlanCase c{.name = fmt::format("optimized/{}", seed),
             .trace = testing::LayeredTrace(4, 8, 6, 8),
             .strategy = Accumulating(what.microbatches),
             .cluster = testing::RandomCluster(random, 4)};
  c.strategy.policy = what.policy;
  c.strategy.mixed_precision =
      MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  if (what.replicas) c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
  OptimizeOptions options{
      .budget = Bytes{std::int64_t{1} << 40}, .may_checkpoint = true, .time_limit_ns = {0}};
  options.fixed = {"policy"};
  Result<OptimizeOutput> output = Optimize(c.trace, c.strategy, c.cluster, options);
  if (output && what.percent < 100) {
    options.budget = Bytes{output->report.peak_reserved_bytes.value * what.percent / 100};
    output = Optimize(c.trace, c.strategy, c.cluster, options);
    if (!output) return std::nullopt;
  }
  EXPECT_TRUE(output.has_value()) << c.name << ": " << ToString(output.error());
  if (!output) return std::nullopt;
  c.strategy = output->strategy;
  return c;
}

TEST(OptimizedPlans, ComputeTheRightNumbers) {
  const OptimizedCase cases[] = {{"fsdp2"},
                                 {"fsdp1"},
                                 {"fsdp2", 3},
                                 {"fsdp1", 3},
                                 {"fsdp2", 1, true},
                                 {"fsdp2", 3, true},
                                 {"fsdp2", 1, false, 80},
                                 {"fsdp2", 3, false, 80}};
  std::uint32_t seed = 0;
  int run = 0;
  for (const OptimizedCase& what : cases) {
    for (int cluster = 0; cluster < 2; ++cluster) {
      const std::optional<PlanCase> c = Optimized(what, ++seed);
      if (!c) continue;
      const Result<PlannerOutput> planned = MakePlan(c->trace, c->strategy, c->cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      ExpectedValues expected(planned->plan, c->trace,
                              std::max<std::int64_t>(c->steps, std::ssize(planned->plan.steps) + 1));
      for (std::uint64_t order = 1; order <= kOrders / 16; ++order) {
        const Findings findings = RunChecked(planned->plan, expected, order);
        ASSERT_EQ(WhatIsWrong(*c, {}, findings), "") << c->name << ", seed " << order;
      }
      ++run;
    }
  }
  EXPECT_GE(run, 12);
}

}  // namespace
}  // namespace shardplan::test
