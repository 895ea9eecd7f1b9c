// The closed form through the planner: trace -> fsdp2 -> simulation, as a user gets it.
#include <gtest/gtest.h>

#include "shardplan/planner/planner.h"
#include "shardplan/simulator/simulate.h"
#include "tests/planner/synthetic.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

void SetDurations(std::vector<Pass>& passes, std::int64_t duration_ns) {
  for (Pass& pass : passes) {
    for (TraceEvent& event : pass.events) {
      if (auto* op = std::get_if<OperatorEvent>(&event)) op->duration_ns = Nanoseconds{duration_ns};
    }
  }
}

Report PlannedReport(int layers, const Strategy& strategy) {
  Trace trace = testing::LayeredTrace(layers, 64, 64);
  SetDurations(trace.forwards, 25 * kMillisecond);
  SetDurations(trace.backwards, 50 * kMillisecond);
  const Cluster cluster = ConstantCluster(2, 10 * kMillisecond, 10 * kMillisecond);
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
  EXPECT_TRUE(planned.has_value()) << ToString(planned.error());
  if (!planned) return {};
  const Result<Simulation> simulation = Simulate(planned->plan);
  EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
  return simulation ? simulation->report : Report{};
}

// Exposed are the first all_gather of the forward, the first all_gather and the last reduce_scatter of the
// backward: 10 + n * 25 and 10 + n * 50 + 10. For 3 layers 85 and 170 ms.
TEST(PlannedClosedForm, Fsdp2Default) {
  // A single layer is no repeated block: the root holds it, and a root is not resharded.
  for (int layers = 2; layers <= 6; ++layers) {
    SCOPED_TRACE(layers);
    const Report report = PlannedReport(layers, {});
    EXPECT_EQ(report.forward_ns.value, (10 + 25 * layers) * kMillisecond);
    EXPECT_EQ(report.backward_ns.value, (20 + 50 * layers) * kMillisecond);
  }
}

// Kept gathered after the forward: the backward has nothing to gather.
TEST(PlannedClosedForm, Fsdp2WithoutReshard) {
  Strategy strategy;
  strategy.reshard_after_forward = false;
  const Report report = PlannedReport(3, strategy);
  EXPECT_EQ(report.forward_ns.value, 85 * kMillisecond);
  EXPECT_EQ(report.backward_ns.value, 160 * kMillisecond);
}

}  // namespace
}  // namespace shardplan::test
