// SPDX-License-Identifier: Apache-2.0
// Figures that the report derives: utilization, throughput, costs of copies and of the optimizer, several
// steps.
#include "shardplan/simulator/simulate.h"

#include <gtest/gtest.h>

#include "tests/simulator/layered_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

Report MustReport(const Plan& plan) {
  Result<Simulation> simulation = Simulate(plan);
  EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
  return simulation ? simulation->report : Report{};
}

OperatorEvent Matmul(std::int64_t flops, std::vector<StorageId> writes = {}) {
  OperatorEvent event = FixedOperator(kMillisecond);
  event.dtype = DType::kBFloat16;
  event.flops = flops;
  event.writes = std::move(writes);
  return event;
}

// 2 + 3 GFLOP in a step of 10 ms at a peak of 1 TFLOP/s (10 GFLOP in that time): 50 %. Recomputed and
// pointwise FLOPs do not count.
TEST(Utilization, CountsModelFlopsWithoutRecomputation) {
  PlanBuilder b(1);
  const UnitId unit = b.Unit("a");
  const SegmentId forward = b.Forward("forward a", {unit});
  const SegmentId backward = b.Backward("backward a", {unit});
  OperatorEvent pointwise = Matmul(7'000'000'000);
  pointwise.name = "aten.mul";
  b.plan().segments[0].entries = {Matmul(2'000'000'000), pointwise};
  OperatorEvent rest = Matmul(0);
  rest.duration_ns = Nanoseconds{6 * kMillisecond};
  b.plan().segments[1].entries = {
      AllocateEvent{.storage = 5, .size_bytes = Bytes{8}, .role = StorageRole::kRecompute},
      Matmul(2'000'000'000, {5}), Matmul(3'000'000'000, {6}), rest};
  b.Step("steady").At(TriggerKind::kPreForward, unit).Compute(forward);
  b.At(TriggerKind::kPreBackward, unit).Compute(backward).At(TriggerKind::kBackwardEnd);
  b.plan().cluster.device.matmul = {{DType::kBFloat16, 1'000'000'000'000, {}}};
  b.plan().tokens_per_step = 50;
  const Report report = MustReport(b.plan());
  EXPECT_EQ(report.step_ns.value, 10 * kMillisecond);
  EXPECT_EQ(report.model_flops_utilization_ppm, 500'000);
  EXPECT_EQ(report.tokens_per_second_per_rank, 5'000);
}

// A byte a nanosecond. Unit of 1,000 fp32 elements over 2 ranks.
TEST(CopyCosts, AreBytesReadAndWritten) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 1'000);
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId in = b.Buffer(BufferRole::kAllGatherInput, unit, DType::kBFloat16);
  const BufferId out = b.Buffer(BufferRole::kAllGatherOutput, unit, DType::kBFloat16);
  const BufferId full = b.Buffer(BufferRole::kParamUnsharded, unit, DType::kBFloat16);
  const BufferId reduced = b.Buffer(BufferRole::kReduceScatterOutput, unit);
  const BufferId grad = b.Buffer(BufferRole::kGradSharded, unit);
  const BufferId low = b.Buffer(BufferRole::kReduceScatterOutput, unit, DType::kBFloat16);
  b.plan().cluster.device.memory_bytes_per_second = 1'000'000'000;
  b.plan().cluster.host_link_bytes_per_second = 500'000'000;
  const auto time = [&](InstructionKind kind, BufferId src, BufferId dst) {
    b.plan().steps.clear();
    b.Step("steady").At(TriggerKind::kStepBegin).Move(kind, src, dst, 0);
    return MustReport(b.plan()).step_ns.value;
  };
  EXPECT_EQ(time(InstructionKind::kCopyIn, shard, in), 2'000 + 1'000);
  EXPECT_EQ(time(InstructionKind::kCopyIn, shard, out), 2'000 + 1'000);  // into this rank's slot
  EXPECT_EQ(time(InstructionKind::kCopyOut, out, full), 2'000 + 2'000);
  EXPECT_EQ(time(InstructionKind::kGradCast, reduced, grad), 0);  // a view
  EXPECT_EQ(time(InstructionKind::kGradCast, low, grad), 1'000 + 2'000);
  EXPECT_EQ(time(InstructionKind::kGradAccumulate, reduced, grad), 2'000 + 2 * 2'000);
  EXPECT_EQ(time(InstructionKind::kGradScale, reduced, -1), 2 * 2'000);
  EXPECT_EQ(time(InstructionKind::kCopyToHost, shard, grad), 4'000);
  EXPECT_EQ(time(InstructionKind::kCopyToDevice, shard, grad), 4'000);
}

// Shard of 4,000 bytes. AdamW fused: reads p, g, m, v, writes p, m, v; foreach: 12 reads and 8 writes in 8
// kernels.
TEST(OptimizerCosts, ArePassesOverTheShard) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 2'000);
  b.Buffer(BufferRole::kParamSharded, unit);
  b.Step("steady").At(TriggerKind::kOptimizerStep).OptimizerStep(0);
  b.plan().cluster.device.memory_bytes_per_second = 1'000'000'000;
  const auto time = [&](OptimizerKind kind, OptimizerImplementation how, bool momentum = false) {
    b.plan().strategy.optimizer = {kind, how, momentum};
    return MustReport(b.plan()).optimizer_ns.value;
  };
  using enum OptimizerImplementation;
  EXPECT_EQ(time(OptimizerKind::kAdamW, kFused), 7 * 4'000);
  EXPECT_EQ(time(OptimizerKind::kAdamW, kForeach), 20 * 4'000);
  EXPECT_EQ(time(OptimizerKind::kSgd, kForeach), 3 * 4'000);
  EXPECT_EQ(time(OptimizerKind::kSgd, kForeach, true), 8 * 4'000);
  EXPECT_EQ(time(OptimizerKind::kNone, kForeach), 0);
  b.plan().cluster.host.operator_issue_ns = Nanoseconds{100};
  b.plan().strategy.optimizer = {};
  EXPECT_EQ(MustReport(b.plan()).host_ns.value, 800);
}

// A shard in host memory is stepped by the host's own thread: 20 passes over 4,000 bytes at half a byte a
// nanosecond, and the issue of 8 kernels. The stream has nothing to do.
TEST(OptimizerCosts, ShardsInHostMemoryAreTheHostsWork) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 2'000);
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  b.plan().buffers[shard].memory = MemoryKind::kPinnedHost;
  b.plan().cluster.device.memory_bytes_per_second = 1'000'000'000;
  b.plan().cluster.host = {.operator_issue_ns = Nanoseconds{100}, .memory_bytes_per_second = 500'000'000};
  for (const StreamId stream : {-1, 0}) {
    b.plan().steps.clear();
    b.Step("steady").At(TriggerKind::kOptimizerStep).OptimizerStep(stream);
    const Report report = MustReport(b.plan());
    EXPECT_EQ(report.step_ns.value, 800 + 160'000);
    EXPECT_EQ(report.optimizer_ns.value, 800 + 160'000);
    EXPECT_EQ(report.host_ns.value, 800 + 160'000);
    EXPECT_EQ(report.host_work_ns.value, 160'000);
    EXPECT_EQ(report.streams[0].busy_ns.value, 0);
    EXPECT_EQ(report.memory.peak_bytes.value, 0);
    EXPECT_EQ(report.memory.host_steady_bytes.value, 4'096 + 2 * 4'000);  // a power of two; AdamW's states
  }
  // Half of the model offloaded: the host first, then the stream.
  const UnitId other = b.Unit("b", 1, 2'000);
  b.Buffer(BufferRole::kParamSharded, other);
  const Report report = MustReport(b.plan());
  EXPECT_EQ(report.step_ns.value, 2 * 800 + 160'000 + 80'000);
  EXPECT_EQ(report.streams[0].busy_ns.value, 80'000);
  EXPECT_EQ(report.host_work_ns.value, 160'000);
}

// A gradient of 4,000 bytes goes to the host in 8,000 ns; the host waits for it and adds it to another:
// 12,000 bytes.
TEST(HostWork, WaitsForWhatItIsOrderedAfter) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 2'000);
  const BufferId reduced = b.Buffer(BufferRole::kReduceScatterOutput, unit);
  const BufferId arrived = b.Buffer(BufferRole::kGradHost, unit);
  const BufferId grad = b.Buffer(BufferRole::kGradHost, unit);
  b.plan().buffers[arrived].memory = b.plan().buffers[grad].memory = MemoryKind::kHost;
  const EventId event = b.Event("arrived");
  b.plan().cluster.host_link_bytes_per_second = 500'000'000;
  b.plan().cluster.host.memory_bytes_per_second = 250'000'000;
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Allocate(arrived, -1).Allocate(grad, -1);
  b.Move(InstructionKind::kCopyToHost, reduced, arrived, 0).Record(event, 0).HostWait(event);
  b.Move(InstructionKind::kGradAccumulate, arrived, grad, -1).Free(arrived);
  const Result<Simulation> simulation = Simulate(b.plan());
  ASSERT_TRUE(simulation.has_value()) << ToString(simulation.error());
  EXPECT_EQ(simulation->report.step_ns.value, 8'000 + 48'000);
  EXPECT_EQ(simulation->report.host_ns.value, 48'000);
  EXPECT_EQ(simulation->report.memory.host_peak_bytes.value, 8'000);
  EXPECT_EQ(simulation->report.memory.host_steady_bytes.value, 4'000);
  ASSERT_EQ(simulation->report.memory.host_peak_by_category.size(), 1U);
  EXPECT_EQ(simulation->report.memory.host_peak_by_category[0].category, "grad_host");
  const Span& last = simulation->spans.back();
  EXPECT_EQ(last.stream, -1);
  EXPECT_EQ(last.end_ns - last.start_ns, Nanoseconds{48'000});
}

// Two copies at once share the engine: each takes twice its time; alone again, full speed. 1,000 and 3,000:
// 2,000 for both halves, then 2,000.
TEST(Sharing, KernelsOfTwoStreamsShareTheEngine) {
  PlanBuilder b(1);
  b.Stream("second");
  const SegmentId one = b.Forward("one", {});
  const SegmentId three = b.Forward("three", {});
  b.plan().segments[0].entries = {FixedOperator(1'000)};
  b.plan().segments[1].entries = {FixedOperator(3'000)};
  b.Step("steady").At(TriggerKind::kStepBegin).Compute(one, 0).Compute(three, 1);
  const Report report = MustReport(b.plan());
  EXPECT_EQ(report.step_ns.value, 4'000);
  EXPECT_EQ(report.streams[0].busy_ns.value, 2'000);
  EXPECT_EQ(report.streams[1].busy_ns.value, 4'000);
  EXPECT_EQ(report.compute_ns.value, 4'000);
}

TEST(Steps, TheReportIsOfTheLastOne) {
  Plan plan = LayeredPlan({});
  PlanStep first = plan.steps[0];
  first.name = "first";
  first.triggers.resize(4);  // the first layer's forward and half of the second's
  plan.steps.insert(plan.steps.begin(), first);
  plan.steady_step = 1;
  const Result<Simulation> simulation = Simulate(plan);
  ASSERT_TRUE(simulation.has_value());
  EXPECT_EQ(simulation->report.step_ns.value, 245 * kMillisecond);
  // The second step begins when the first one is done.
  Nanoseconds first_end;
  for (const Span& span : simulation->spans) {
    if (span.step == 0) first_end = std::max(first_end, span.end_ns);
  }
  EXPECT_EQ(first_end.value, 60 * kMillisecond);
  for (const Span& span : simulation->spans) {
    if (span.step == 1) {
      EXPECT_GE(span.start_ns, first_end);
    }
  }
}

TEST(Options, AnotherClusterCanBeGiven) {
  Plan plan = LayeredPlan({});
  plan.cluster = ConstantCluster(2, 20 * kMillisecond, 0);
  const Result<Simulation> simulation = Simulate(plan, {.plan_digest = "sha256:0"});
  ASSERT_TRUE(simulation.has_value());
  EXPECT_EQ(simulation->report.forward_ns.value, (20 + 3 * 25) * kMillisecond);
  EXPECT_EQ(simulation->report.plan_digest, "sha256:0");
}

}  // namespace
}  // namespace shardplan::test
