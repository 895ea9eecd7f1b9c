// SPDX-License-Identifier: Apache-2.0
// Wherever the search ends, and whatever the budget is: no setting of the grid is faster than the answer, and
// the answer is the same on any number of threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/simulator/reserved_memory.h"
#include "tests/planner/parts_cases.h"

namespace shardplan {
namespace {

using testing::kLoose;
using testing::OfOneSeed;
using testing::PartsCase;
using testing::RandomPartsCase;
using testing::SeedsUpTo;

Strategy JobOf(std::uint32_t seed) {
  Strategy strategy;
  if (seed % 2 != 0) strategy.program = {testing::MicrobatchStep(3)};
  return strategy;
}

OptimizeOptions Options(std::optional<Bytes> budget, std::int64_t plan_limit, std::int32_t threads) {
  return {.budget = budget,
          .may_change_policy = true,
          .may_checkpoint = true,
          .plan_limit = plan_limit,
          .threads = threads};
}

// The fastest setting of the grid that fits, every one of them planned and asked.
std::optional<Nanoseconds> BestOfGrid(const PartsCase& c, const Strategy& strategy,
                                      const OptimizeOptions& options) {
  optimize::Job job = optimize::MakeJob(c.trace, strategy, c.cluster.ranks);
  optimize::Evaluator evaluator(c.trace, job, c.cluster, options);
  std::optional<Nanoseconds> best;
  for (const optimize::Choice& work : optimize::Grid(job, options)) {
    std::vector<optimize::Choice> settings = optimize::Orders(job, work);
    settings.push_back(work);
    const std::vector<optimize::Evaluation> evaluations = evaluator.Evaluate(settings, /*even_late=*/true);
    for (std::size_t i = 0; i < settings.size(); ++i) {
      const optimize::Evaluation& e = evaluations[i];
      if (!e.planned || e.over || (best && e.step_ns >= *best)) continue;
      if (evaluator.Fits(settings[i])) best = e.step_ns;
    }
  }
  return best;
}

TEST(OptimizeLimits, NoSettingOfTheGridIsFasterWhereverTheSearchEnds) {
  const auto [first, last] = SeedsUpTo(2);
  int compared = 0;
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    const PartsCase c = RandomPartsCase(seed, 3);
    const Strategy strategy = JobOf(seed);
    const Result<OptimizeOutput> loose = Optimize(c.trace, strategy, c.cluster, Options(kLoose, 0, 1));
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    for (const std::int64_t percent : {100, 70}) {
      const Bytes budget{loose->report.peak_reserved_bytes.value * percent / 100};
      const auto of_grid = BestOfGrid(c, strategy, Options(budget, 0, 1));
      for (const std::int64_t limit : {1, 30, 0}) {
        const Result<OptimizeOutput> output =
            Optimize(c.trace, strategy, c.cluster, Options(budget, limit, 1));
        if (!output) {
          EXPECT_FALSE(of_grid.has_value()) << percent << " %, " << limit << " plans: a setting fits";
          continue;
        }
        EXPECT_LE(output->report.peak_reserved_bytes, budget);
        if (!of_grid) continue;
        ++compared;
        EXPECT_LE(output->report.step_ns, *of_grid) << percent << " %, " << limit << " plans";
      }
    }
  }
  EXPECT_TRUE(compared > 0 || OfOneSeed());
}

// A strategy of FSDP1's, set by hand, that verifies and fits.
void ExpectNoFsdp1SettingIsFaster(const PartsCase& c, const Strategy& job, Bytes budget, Nanoseconds step_ns,
                                  int& compared) {
  using enum Fsdp1Sharding;
  const bool hybrid = job.mesh.size() > 1;
  const auto shardings =
      hybrid ? std::vector{kHybridShard, kHybridShardZero2} : std::vector{kFullShard, kShardGradOp};
  for (const Fsdp1Sharding sharding : shardings) {
    for (int knobs = 0; knobs < 6; ++knobs) {
      Strategy strategy = job;
      strategy.fsdp1.sharding = sharding;
      strategy.fsdp1.use_orig_params = true;
      strategy.fsdp1.forward_prefetch = knobs % 2 == 1;
      strategy.fsdp1.backward_prefetch = static_cast<Fsdp1BackwardPrefetch>(knobs / 2);
      const Result<PlannerOutput> planned = MakePlan(c.trace, strategy, c.cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      const FitOptions options{.budget_bytes = budget, .releases = false};
      const Result<DeviceFit> fit = FitDevice(planned->plan, options);
      if (!planned->faults.empty() || !fit || !fit->Fits(false)) continue;
      const Result<optimize::Evaluation> measured = optimize::Measure(planned->plan, options);
      ASSERT_TRUE(measured.has_value());
      ++compared;
      EXPECT_LE(step_ns, measured->step_ns) << static_cast<int>(sharding) << ", knobs " << knobs;
    }
  }
}

TEST(OptimizeLimits, NoSettingIsFasterWithFsdp1ReplicasAndExpandableSegments) {
  const auto [first, last] = SeedsUpTo(1);
  int compared = 0, by_hand = 0;
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    PartsCase c = RandomPartsCase(seed, 2);
    c.cluster.ranks_per_node = 2;
    for (const std::string policy : {"fsdp1", "fsdp2"}) {
      for (const bool hybrid : {false, true}) {
        for (const bool expandable : {false, true}) {
          SCOPED_TRACE(fmt::format("SHARDPLAN_SEED={} {}{}{}", seed, policy, hybrid ? " hybrid" : "",
                                   expandable ? " expandable" : ""));
          Strategy strategy = JobOf(seed);
          strategy.policy = policy;
          if (hybrid) strategy.mesh = {{"replicate", 2}, {"shard", 2}};
          if (expandable) strategy.alloc_conf = "expandable_segments:True";
          OptimizeOptions options = Options(kLoose, 0, 1);
          options.may_change_policy = false;
          const Result<OptimizeOutput> loose = Optimize(c.trace, strategy, c.cluster, options);
          ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
          const Bytes budget{loose->report.peak_reserved_bytes.value * 4 / 5};
          options.budget = budget;
          const auto of_grid = BestOfGrid(c, strategy, options);
          options.plan_limit = 20;
          const Result<OptimizeOutput> output = Optimize(c.trace, strategy, c.cluster, options);
          EXPECT_EQ(output.has_value() || !of_grid, true) << "a setting fits";
          if (!output) continue;
          EXPECT_LE(output->report.peak_reserved_bytes, budget);
          if (of_grid) {
            ++compared;
            EXPECT_LE(output->report.step_ns, *of_grid);
          }
          if (policy == "fsdp1")
            ExpectNoFsdp1SettingIsFaster(c, strategy, budget, output->report.step_ns, by_hand);
        }
      }
    }
  }
  EXPECT_TRUE(compared > 3 || OfOneSeed());
  EXPECT_TRUE(by_hand > 3 || OfOneSeed());
}

TEST(OptimizeLimits, ThePlanIsTheSameOnAnyNumberOfThreadsWhereverTheLimitEndsTheSearch) {
  const auto [first, last] = SeedsUpTo(2);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    const PartsCase c = RandomPartsCase(seed, 5);
    for (const std::int64_t limit : {1, 17, 60}) {
      const Result<OptimizeOutput> one = Optimize(c.trace, JobOf(seed), c.cluster, Options({}, limit, 1));
      const Result<OptimizeOutput> three = Optimize(c.trace, JobOf(seed), c.cluster, Options({}, limit, 3));
      ASSERT_EQ(one.has_value(), three.has_value());
      if (!one) continue;
      EXPECT_EQ(one->report.plan_digest, three->report.plan_digest) << limit << " plans";
      EXPECT_EQ(one->report.evaluations, three->report.evaluations) << limit << " plans";
      EXPECT_EQ(one->report.complete, three->report.complete) << limit << " plans";
    }
  }
}

// A larger budget gives no slower plan.
TEST(OptimizeLimits, MoreMemoryIsNeverSlower) {
  const auto [first, last] = SeedsUpTo(2);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    const PartsCase c = RandomPartsCase(seed, 5);
    const Strategy strategy = JobOf(seed);
    const Result<OptimizeOutput> loose = Optimize(c.trace, strategy, c.cluster, Options(kLoose, 0, 1));
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    Nanoseconds before = loose->report.step_ns;
    for (const std::int64_t percent : {90, 75, 60}) {
      const Bytes budget{loose->report.peak_reserved_bytes.value * percent / 100};
      const Result<OptimizeOutput> output = Optimize(c.trace, strategy, c.cluster, Options(budget, 0, 1));
      if (!output) break;
      EXPECT_GE(output->report.step_ns, before) << percent << " %";
      before = std::max(before, output->report.step_ns);
    }
  }
}

}  // namespace
}  // namespace shardplan
