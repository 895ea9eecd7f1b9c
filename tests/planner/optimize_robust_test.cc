// SPDX-License-Identifier: Apache-2.0
// The plan that is best at the worst of the costs: its figures are those of plans made and simulated there,
// and neither the fastest plan nor a common setting is better at its worst.
#include <gtest/gtest.h>

#include <algorithm>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/reserved_memory.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/parts_cases.h"

namespace shardplan {
namespace {

using testing::PartsCase;
using testing::RandomPartsCase;
using testing::SeedsUpTo;

constexpr std::int64_t kOff = 200'000;

// Every figure of a kind, by hand.
Cluster OffBy(Cluster cluster, std::int64_t compute_ppm, std::int64_t links_ppm, std::int64_t overlap_ppm) {
  using enum ClusterFigure;
  for (const ClusterFigure figure : {kMatmul, kAttention, kVector, kMemory, kKernelOverhead})
    cluster = WithFigure(cluster, figure, compute_ppm);
  for (const ClusterFigure figure : {kInnerLink, kNetwork, kHostLink, kCollectives})
    cluster = WithFigure(cluster, figure, links_ppm);
  for (const ClusterFigure figure : {kComputeSlowdown, kCommunicationSlowdown})
    cluster = WithFigure(cluster, figure, overlap_ppm);
  return cluster;
}

Nanoseconds StepAt(const PartsCase& c, const Strategy& strategy, const Cluster& cluster) {
  const Result<PlannerOutput> planned = MakePlan(c.trace, strategy, cluster);
  EXPECT_TRUE(planned.has_value());
  return planned ? optimize::Measure(planned->plan)->step_ns : Nanoseconds{};
}

Nanoseconds WorstOf(const PartsCase& c, const Strategy& strategy) {
  Nanoseconds worst = StepAt(c, strategy, c.cluster);
  for (const std::int64_t compute : {1'000'000 - kOff, 1'000'000 + kOff}) {
    for (const std::int64_t links : {1'000'000 - kOff, 1'000'000 + kOff}) {
      for (const std::int64_t overlap : {1'000'000 - kOff, 1'000'000 + kOff})
        worst = std::max(worst, StepAt(c, strategy, OffBy(c.cluster, compute, links, overlap)));
    }
  }
  return worst;
}

TEST(OptimizeRobust, NeitherTheFastestPlanNorABaselineIsBetterAtItsWorst) {
  const auto [first, last] = SeedsUpTo(2);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    const PartsCase c = RandomPartsCase(seed, 3);
    Strategy job;
    if (seed % 2 == 0) job.program = {testing::MicrobatchStep(2)};
    OptimizeOptions options{.budget = testing::kLoose, .may_checkpoint = true, .threads = 2};
    const Result<OptimizeOutput> loose = Optimize(c.trace, job, c.cluster, options);
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    for (const std::int64_t percent : {100, 70}) {
      options.budget = Bytes{loose->report.peak_reserved_bytes.value * percent / 100};
      options.robust_ppm = 0;
      const Result<OptimizeOutput> plain = Optimize(c.trace, job, c.cluster, options);
      options.robust_ppm = kOff;
      const Result<OptimizeOutput> output = Optimize(c.trace, job, c.cluster, options);
      ASSERT_EQ(plain.has_value(), output.has_value());
      if (!output) continue;
      ASSERT_TRUE(output->report.robust.has_value());
      const RobustReport& robust = *output->report.robust;
      EXPECT_TRUE(Verify(output->plan).empty());
      EXPECT_LE(output->report.peak_reserved_bytes, *options.budget);
      // The second search may have come by a faster one.
      EXPECT_LE(robust.plain_step_ns, plain->report.step_ns);
      EXPECT_LE(robust.plain_step_ns, output->report.step_ns);
      EXPECT_LE(output->report.lower_bound_ns, output->report.step_ns);
      EXPECT_EQ(robust.corners.size(), 8U);
      EXPECT_EQ(robust.worst_ns, WorstOf(c, output->strategy));
      const Nanoseconds plain_worst = WorstOf(c, plain->strategy);
      EXPECT_LE(robust.worst_ns, plain_worst);
      if (robust.plain_step_ns == plain->report.step_ns) {
        EXPECT_EQ(robust.plain_worst_ns, plain_worst);
      }
      EXPECT_LE(robust.worst_ns, robust.plain_worst_ns);
      const optimize::Job made = optimize::MakeJob(c.trace, job, c.cluster.ranks);
      for (const optimize::NamedChoice& baseline : optimize::Baselines(made, options)) {
        const Strategy strategy = optimize::StrategyOf(made, baseline.choice);
        const Result<PlannerOutput> planned = MakePlan(c.trace, strategy, c.cluster);
        ASSERT_TRUE(planned.has_value());
        const auto fit = FitDevice(planned->plan, {.budget_bytes = options.budget, .releases = false});
        if (!fit || !fit->Fits(false)) continue;
        EXPECT_LE(robust.worst_ns, WorstOf(c, strategy)) << baseline.name;
      }
    }
  }
}

TEST(OptimizeRobust, IsTheSameOnAnyNumberOfThreads) {
  const PartsCase c = RandomPartsCase(2, 3);
  OptimizeOptions options{.robust_ppm = kOff, .plan_limit = 40, .threads = 1};
  const Result<OptimizeOutput> one = Optimize(c.trace, {}, c.cluster, options);
  options.threads = 3;
  const Result<OptimizeOutput> three = Optimize(c.trace, {}, c.cluster, options);
  ASSERT_EQ(one.has_value(), three.has_value());
  if (!one) return;
  EXPECT_EQ(one->report.plan_digest, three->report.plan_digest);
  EXPECT_EQ(one->report.robust, three->report.robust);
  EXPECT_EQ(one->report.evaluations, three->report.evaluations);
}

}  // namespace
}  // namespace shardplan
