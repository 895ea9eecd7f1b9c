// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include "shardplan/simulator/simulate.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

constexpr std::int64_t kMs = 1'000'000;

// The layered plan: a first gather of 10 ms, 3 x 25 and 3 x 50 ms of compute, a last scatter of 10 ms are
// exposed. Its operators are measured, so the tables are all that can be off: 10 % of both, +-1 ms each.
TEST(Sensitivity, OfTheExposedCollectives) {
  Plan plan = LayeredPlan({});
  plan.cluster.sources = {{ClusterFigure::kCollectives, FigureOrigin::kMeasured, 100'000, "", ""},
                          {ClusterFigure::kMatmul, FigureOrigin::kGuess, 500'000, "", ""}};
  const Result<Sensitivity> sensitivity = AnalyseSensitivity(plan, plan.cluster);
  ASSERT_TRUE(sensitivity.has_value()) << ToString(sensitivity.error());
  EXPECT_EQ(sensitivity->step_ns.value, 245 * kMs);
  ASSERT_EQ(sensitivity->effects.size(), 2U);
  const FigureEffect& tables = sensitivity->effects[0];
  EXPECT_EQ(tables.source.figure, ClusterFigure::kCollectives);
  EXPECT_EQ(tables.worse_ns.value, 247 * kMs);
  EXPECT_EQ(tables.better_ns.value,
            225 * kMs + 2 * 9'090'910);  // 10 ms / 1.1, by a factor of parts per million
  EXPECT_EQ(sensitivity->effects[1].worse_ns.value, 245 * kMs);
  EXPECT_EQ(sensitivity->high_ns, tables.worse_ns);
  EXPECT_EQ(sensitivity->low_ns, tables.better_ns);
  const std::string text = IntervalText(*sensitivity);
  EXPECT_NE(text.find("245.00 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("collectives (measured, 10.0 %)"), std::string::npos) << text;
}

// Two figures that change 3 and 4 ms on one side: 5 ms together.
TEST(Sensitivity, FiguresAreIndependent) {
  Plan plan = LayeredPlan({});
  plan.cluster.sources = {{ClusterFigure::kCollectives, FigureOrigin::kMeasured, 150'000, "", ""}};
  const Result<Sensitivity> one = AnalyseSensitivity(plan, plan.cluster);
  ASSERT_TRUE(one.has_value());
  EXPECT_EQ((one->high_ns - one->step_ns).value, 3 * kMs);
  // Host costs shift only the begin: 1 ms for the first gather's issue, four times as much.
  plan.cluster.host.collective_issue_ns = Nanoseconds{kMs};
  plan.cluster.sources.push_back({ClusterFigure::kHost, FigureOrigin::kGuess, 1'000'000, "", ""});
  const Result<Sensitivity> both = AnalyseSensitivity(plan, plan.cluster);
  ASSERT_TRUE(both.has_value());
  double squares = 0;
  for (const FigureEffect& effect : both->effects) {
    const auto change = static_cast<double>((effect.worse_ns - both->step_ns).value);
    squares += change * change;
  }
  const auto wide = static_cast<double>((both->high_ns - both->step_ns).value);
  EXPECT_NEAR(wide * wide, squares, squares * 1e-6);
}

// Every figure of a document changes what it says it does: something of the cluster, and nothing at 1.
TEST(Sensitivity, EveryFigureChangesTheCluster) {
  Cluster cluster = LayeredPlan({}).cluster;
  cluster.device.matmul = {{DType::kBFloat16, 1'000, {}, {{100, {{10, Nanoseconds{1'000}}}}}}};
  cluster.device.attention = cluster.device.attention_backward = {{DType::kBFloat16, 1'000}};
  cluster.device.vector_flops_per_second = cluster.device.memory_bytes_per_second = 1'000;
  cluster.device.kernel_overhead_ns = cluster.host.trigger_ns = Nanoseconds{1'000};
  cluster.host.memory_bytes_per_second = cluster.host_link_bytes_per_second = 1'000;
  cluster.links = {{"a", Nanoseconds{10}, 1'000}, {"b", Nanoseconds{10}, 1'000}};
  cluster.compute_rate_while_communicating_ppm = cluster.communication_rate_while_computing_ppm = 900'000;
  for (int figure = 0; figure <= static_cast<int>(ClusterFigure::kCommunicationSlowdown); ++figure) {
    const auto kind = static_cast<ClusterFigure>(figure);
    EXPECT_EQ(WithFigure(cluster, kind, 1'000'000), cluster) << Name(kind);
    EXPECT_NE(WithFigure(cluster, kind, 2'000'000), cluster) << Name(kind);
  }
  EXPECT_EQ(WithFigure(cluster, ClusterFigure::kNetwork, 2'000'000).links[1].bytes_per_second, 500);
  EXPECT_EQ(
      WithFigure(cluster, ClusterFigure::kComputeSlowdown, 2'000'000).compute_rate_while_communicating_ppm,
      800'000);
  EXPECT_EQ(
      WithFigure(cluster, ClusterFigure::kMatmul, 2'000'000).device.matmul[0].shapes[0].points[0].duration_ns,
      Nanoseconds{2'000});
}

TEST(Sensitivity, WithoutSourcesThereIsNoInterval) {
  const Plan plan = LayeredPlan({});
  const Result<Sensitivity> sensitivity = AnalyseSensitivity(plan, plan.cluster);
  ASSERT_TRUE(sensitivity.has_value());
  EXPECT_EQ(sensitivity->low_ns, sensitivity->high_ns);
  EXPECT_EQ(IntervalText(*sensitivity), "");
}

}  // namespace
}  // namespace shardplan::test
