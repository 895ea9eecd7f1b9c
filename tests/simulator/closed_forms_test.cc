// SPDX-License-Identifier: Apache-2.0
// Schedules whose times follow on paper. F, B: forward and backward compute of a layer; C: any collective.
#include <gtest/gtest.h>

#include "shardplan/simulator/simulate.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

Report ReportOf(const Plan& plan) {
  const Result<Simulation> simulation = Simulate(plan);
  EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
  return simulation ? simulation->report : Report{};
}

// Forward and backward each from an idle device; the step without a break between them.
void ExpectTimes(const Report& report, std::int64_t forward_ms, std::int64_t backward_ms,
                 std::int64_t step_ms) {
  EXPECT_EQ(report.forward_ns.value, forward_ms * kMillisecond);
  EXPECT_EQ(report.backward_ns.value, backward_ms * kMillisecond);
  EXPECT_EQ(report.step_ns.value, step_ms * kMillisecond);
}

// F = 25, B = 50, C = 10. Forward: only the first all_gather is exposed, the others run under the layer
// before: 10 + 3 * 25 = 85. Backward: the first all_gather and the last reduce_scatter are: 10 + 3 * 50 + 10
// = 170.
// The step is 245: the host is ahead of the device, and the backward's first all_gather runs under the
// forward.
TEST(ClosedForms, DefaultExposesFirstGatherAndLastScatter) {
  const Report report = ReportOf(LayeredPlan({}));
  ExpectTimes(report, 85, 170, 245);
  EXPECT_EQ(report.compute_ns.value, 3 * (25 + 50) * kMillisecond);
  EXPECT_EQ(report.communication_ns.value, 9 * 10 * kMillisecond);
  EXPECT_EQ(report.exposed_communication_ns.value, 2 * 10 * kMillisecond);
  EXPECT_EQ(report.overlap_ppm, 777'778);  // 7 of 9
}

// The same numbers for other depths: F: C + n F, B: C + n B + C.
TEST(ClosedForms, DefaultAtAnyDepth) {
  for (int layers = 1; layers <= 12; ++layers) {
    SCOPED_TRACE(layers);
    ExpectTimes(ReportOf(LayeredPlan({.layers = layers})), 10 + 25 * layers, 20 + 50 * layers,
                20 + 75 * layers);
  }
}

// Kept gathered: nothing to gather in the backward: 3 * 50 + 10 = 160.
TEST(ClosedForms, NoReshardAfterForwardSavesTheBackwardGather) {
  ExpectTimes(ReportOf(LayeredPlan({.reshard_after_forward = false})), 85, 160, 245);
}

// Without prefetch the host still runs ahead: the all_gather of layer 2 is issued before layer 3 has
// computed, but after the reduce_scatter of layer 3, and the two share a communicator. With one communicator
// it starts when that reduce_scatter ends: layer 3: gather 0-10, compute 10-60, scatter 60-70; layer 2:
// gather 70-80, compute 80-130, scatter 130-140; layer 1: gather 140-150, compute 150-200, scatter 200-210.
TEST(ClosedForms, NoBackwardPrefetchOnOneCommunicatorExposesEverything) {
  const Report report = ReportOf(LayeredPlan({.backward_prefetch = false}));
  ExpectTimes(report, 85, 210, 285);
  // Forward: the first gather. Backward: all but the first, which runs under the forward.
  EXPECT_EQ(report.exposed_communication_ns.value, (10 + 5 * 10) * kMillisecond);
}

// With a communicator of its own, the all_gather of layer 2 runs under layer 3 although nobody asked for it:
// the device's streams do not know hooks. So no prefetch costs nothing here: 170.
TEST(ClosedForms, NoBackwardPrefetchOnTwoCommunicatorsOverlapsByHostRunahead) {
  ExpectTimes(ReportOf(LayeredPlan({.backward_prefetch = false, .one_communicator = false})), 85, 170, 245);
}

// F = B = 5, C = 10, two communicators. Forward: gathers back to back, then the last layer: 3 * 10 + 5 = 35.
// Backward: gather 3 0-10, gather 2 10-20, gather 1 20-30; compute 3 10-15, scatter 3 15-25; compute 2 20-25,
// scatter 2 25-35; compute 1 30-35, scatter 1 (when its stream is free) 35-45.
// The step: six gathers back to back, 0-60, then as in the backward, which had its gathers at 0-30: 30 + 45
// = 75.
TEST(ClosedForms, CommunicationBoundOnTwoCommunicators) {
  const LayeredOptions options{
      .forward_ns = 5 * kMillisecond, .backward_ns = 5 * kMillisecond, .one_communicator = false};
  Plan plan = LayeredPlan(options);
  // The two communicators do not share the link here: no link is known to the collectives.
  plan.cluster.links.clear();
  ExpectTimes(ReportOf(plan), 35, 45, 75);
}

// The same with one communicator, in host order: gather 3 0-10, gather 2 10-20, scatter 3 20-30 (ready at
// 15), gather 1 30-40, scatter 2 40-50 (ready at 25), compute 1 40-45, scatter 1 50-60.
// The step: 30 + 60 = 90.
TEST(ClosedForms, CommunicationBoundOnOneCommunicator) {
  ExpectTimes(ReportOf(LayeredPlan({.forward_ns = 5 * kMillisecond, .backward_ns = 5 * kMillisecond})), 35,
              60, 90);
}

// And with two communicators that share one link fairly. Progress in ms of a collective alone:
// 0-10 gather 3; from 10 gather 2 alone until scatter 3 is ready at 15 (5 done); both at half rate: gather 2
// needs 10 more until 25; scatter 3 has 5 done then. Compute 2 25-30. Gather 1 from 25 with scatter 3 at half
// rate: scatter 3 needs 10 more until 35; gather 1 has 5 done. Scatter 2, ready at 30 but behind scatter 3 on
// its stream, starts at 35; both at half rate: gather 1 ends at 45, scatter 2 has 5 done. Compute 1 45-50;
// scatter 2 alone 45-50; scatter 1 50-60.
TEST(ClosedForms, CommunicationBoundOnASharedLink) {
  const LayeredOptions options{
      .forward_ns = 5 * kMillisecond, .backward_ns = 5 * kMillisecond, .one_communicator = false};
  const Report report = ReportOf(LayeredPlan(options));
  ExpectTimes(report, 35, 60, 90);
  EXPECT_EQ(report.communication_ns.value, 90 * kMillisecond);
}

// Compute at 80 % while a collective is in flight. Forward: the first gather exposed, 10. Each of two gathers
// lasts 10 and takes 2 ms of compute away: 75 + 2 * 2 = 79; 89 in all. Backward: gather 3 exposed, 10;
// gathers of 2 and 1 and scatters of 3 and 2 under compute, each takes 2 ms away: 150 + 4 * 2; last scatter
// 10: 178.
// The step has 7 collectives under compute: 10 + 225 + 7 * 2 + 10 = 259.
TEST(ClosedForms, ComputeSlowedByCommunication) {
  Plan plan = LayeredPlan({});
  plan.cluster.compute_rate_while_communicating_ppm = 800'000;
  ExpectTimes(ReportOf(plan), 89, 178, 259);
}

// Communication at 50 % while compute runs: overlapped collectives last 20 and still fit under the layers;
// the exposed ones keep their 10. Times are those of the default; communication of the step is 7 * 20 + 2
// * 10.
TEST(ClosedForms, CommunicationSlowedByCompute) {
  Plan plan = LayeredPlan({});
  plan.cluster.communication_rate_while_computing_ppm = 500'000;
  const Report report = ReportOf(plan);
  ExpectTimes(report, 85, 170, 245);
  EXPECT_EQ(report.communication_ns.value, (7 * 20 + 2 * 10) * kMillisecond);
}

// Both: a collective under compute lasts 20 (rate 0.5) and takes 20 * 0.2 = 4 from it. Forward: 10 + 75 + 2 *
// 4 = 93. Backward: 10 + 150 + 4 * 4 + 10 = 186.
// Step: 10 + 225 + 7 * 4 + 10 = 273.
TEST(ClosedForms, BothSlowed) {
  Plan plan = LayeredPlan({});
  plan.cluster.compute_rate_while_communicating_ppm = 800'000;
  plan.cluster.communication_rate_while_computing_ppm = 500'000;
  ExpectTimes(ReportOf(plan), 93, 186, 273);
}

// The host issues layer i's gather only when layer i - 1 is computed: every gather is exposed. 3 * (10 + 25)
// = 105.
TEST(ClosedForms, RateLimiterOfOneExposesEveryGather) {
  const Report report = ReportOf(LayeredPlan({.all_gather_limit = 1}));
  ExpectTimes(report, 105, 170, 265);
}

// A limit of two lets one gather run ahead, which is all that is needed here.
TEST(ClosedForms, RateLimiterOfTwoCostsNothing) {
  ExpectTimes(ReportOf(LayeredPlan({.all_gather_limit = 2})), 85, 170, 245);
}

// HSDP: an all_reduce of 20 follows each reduce_scatter on a stream and communicator of its own. In the
// backward only the last is exposed: 10 + 150 + 10 + 20 = 190. (It shares the link with gathers only while
// both are in flight: scatter 3 60-70, all_reduce 3 70-90, gather 1 60.. on the shard communicator after
// scatter 3: 70-90 shared with the all_reduce, each at half rate: gather 1 done 90, all_reduce 3 at 100. All
// under layer 2, 60-110.)
TEST(ClosedForms, HsdpAllReduceFollowsTheScatter) {
  const Report report = ReportOf(LayeredPlan({.all_reduce_ns = 20 * kMillisecond}));
  ExpectTimes(report, 85, 190, 265);
}

// Host: a hook costs 1 ms, the one operator of a layer 2 ms, nothing else. The first gather is issued at 1,
// the first operator at 3: gather 1-11, compute 11-36, and from there the device is behind the host: 11 + 75
// = 86. The backward likewise: 1 + 170. In the step the host is ahead when the
// backward begins: 1 + 245.
TEST(ClosedForms, HostCostsShiftOnlyTheBegin) {
  Plan plan = LayeredPlan({});
  plan.cluster.host.trigger_ns = Nanoseconds{kMillisecond};
  plan.cluster.host.operator_issue_ns = Nanoseconds{2 * kMillisecond};
  ExpectTimes(ReportOf(plan), 86, 171, 246);
}

// Tiny kernels are bound by the host: 100 operators of 1 us each, issued every 5 us: the last one is issued
// at 500 and ends at 501 us.
TEST(ClosedForms, TinyKernelsRunAtTheHostsPace) {
  Plan plan = LayeredPlan({.layers = 1, .collective_ns = 0});
  plan.segments[0].entries.assign(100, FixedOperator(1'000));
  plan.segments[1].entries.clear();
  plan.cluster.host.operator_issue_ns = Nanoseconds{5'000};
  const Report report = ReportOf(plan);
  EXPECT_EQ(report.forward_ns.value, 501'000);
  EXPECT_EQ(report.compute_ns.value, 100'000);
  EXPECT_EQ(report.host_ns.value, 500'000);
}

// 10 operators of 1 us, then one of 100 us, then 10 of 1 us; issued every 5 us. Operator 11 is issued at 55
// and ends at 155, when all 21 are issued (105): the rest runs back to back until 165.
TEST(ClosedForms, ALongKernelLetsTheHostCatchUp) {
  Plan plan = LayeredPlan({.layers = 1, .collective_ns = 0});
  std::vector<SegmentEntry> entries(21, FixedOperator(1'000));
  entries[10] = FixedOperator(100'000);
  plan.segments[0].entries = entries;
  plan.segments[1].entries.clear();
  plan.cluster.host.operator_issue_ns = Nanoseconds{5'000};
  EXPECT_EQ(ReportOf(plan).forward_ns.value, 165'000);
}

}  // namespace
}  // namespace shardplan::test
