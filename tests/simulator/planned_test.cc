// SPDX-License-Identifier: Apache-2.0
// The closed form through the planner: trace -> fsdp2 -> simulation, as a user gets it.
#include <gtest/gtest.h>

#include "shardplan/planner/planner.h"
#include "shardplan/simulator/memory_history.h"
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

// Each micro-batch passes forward and backward alone: twice what one takes.
TEST(PlannedClosedForm, EveryMicrobatchCounts) {
  for (const int microbatches : {1, 2, 3}) {
    Strategy strategy;
    StepProgram step;
    for (int m = 0; m < microbatches; ++m) {
      step.push_back(ForwardCall{.microbatch = m});
      step.push_back(BackwardCall{.microbatches = {m}});
    }
    step.push_back(OptimizerStepCall{});
    step.push_back(ZeroGradCall{});
    strategy.program = {step};
    const Report report = PlannedReport(3, strategy);
    EXPECT_EQ(report.forward_ns.value, microbatches * 85 * kMillisecond);
    EXPECT_EQ(report.backward_ns.value, microbatches * 170 * kMillisecond);
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

// Two blocks like a small Llama's, in bfloat16 on 4 ranks. Its parameters: a norm, four weights of the
// attention, a norm, three of the feed-forward.
Plan PlannedBlocks(std::int64_t hidden, Strategy strategy) {
  const testing::TreeModule block = {
      .class_name = "Block",
      .parameters = {
          {96}, {96, 96}, {48, 96}, {48, 96}, {96, 96}, {96}, {hidden, 96}, {hidden, 96}, {96, hidden}}};
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList", .children = {block, block}};
  list.children[0].name = "0";
  list.children[1].name = "1";
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  const Trace trace = testing::TraceOf({.class_name = "Model", .children = {list}});
  for (const Parameter& parameter : trace.parameters) {
    const bool matrix = parameter.shape.size() > 1;
    if (matrix && strategy.fsdp2.shard_dims.size() == 1) {
      strategy.fsdp2.shard_dims[0].parameters.push_back(parameter.fqn);
    }
  }
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, ConstantCluster(4, 1, 1));
  EXPECT_TRUE(planned.has_value()) << ToString(planned.error());
  return planned ? planned->plan : Plan{};
}

// The allocations (+) and frees (-) of the first step at a trigger, each rounded up to 512 bytes.
std::vector<std::int64_t> BytesAt(const Plan& plan, TriggerKind kind, UnitId unit) {
  const MemoryHistory history = MemoryHistoryOf(plan, {});
  std::vector<std::int64_t> found;
  const std::vector<Trigger>& triggers = plan.steps[0].triggers;
  for (const MemoryAction& action : history.actions) {
    if (action.at.step != 0 || action.at.trigger < 0 || action.at.trigger >= std::ssize(triggers)) continue;
    const Trigger& trigger = triggers[static_cast<std::size_t>(action.at.trigger)];
    if (trigger.kind != kind || trigger.unit != unit) continue;
    const MemoryBlock& block = history.blocks[static_cast<std::size_t>(action.block)];
    const std::int64_t bytes = (block.requested_bytes.value + 511) / 512 * 512;
    found.push_back(action.frees ? -bytes : bytes);
  }
  return found;
}

// The figures are real PyTorch's in the post-forward of a block that is kept on a mesh of 2.
TEST(PlannedMemory, AnIntegerReshardGoesParameterByParameter) {
  const Plan plan = PlannedBlocks(200, {.reshard_after_forward = std::int64_t{2}});
  EXPECT_EQ(BytesAt(plan, TriggerKind::kPostForward, 1),
            (std::vector<std::int64_t>{512, -512, 9216, -18432, 4608, -9216, 4608, -9216, 9216, -18432, 512,
                                       -512, 19456, -38400, 19456, -38400, 19456, -38400}));
}

// The figures are real PyTorch's in the post-backward of the last block, its matrices cut along dimension 1:
// the changes between two allocations are one sum.
TEST(PlannedMemory, GradientsOfOtherDimensionsGoOneByOne) {
  const auto found = [](PyTorchVersion release) {
    const Plan plan =
        PlannedBlocks(400, {.pytorch = release, .fsdp2 = {.shard_dims = {{.parameters = {}, .dim = 1}}}});
    std::vector<std::int64_t> merged;
    for (const std::int64_t bytes : BytesAt(plan, TriggerKind::kPostBackward, 2)) {
      if (bytes < 0 && !merged.empty() && merged.back() < 0) {
        merged.back() += bytes;
      } else {
        merged.push_back(bytes);
      }
    }
    return merged;
  };
  const std::int64_t whole = -(2 * 512 + 2 * 18432 + 2 * 9216 + 3 * 76800);
  EXPECT_EQ(found(PyTorchVersion::k2_11),
            (std::vector<std::int64_t>{whole, 18432, -18432, 9216, 9216, -2 * 9216, 18432, -18432, 76800,
                                       76800, -2 * 76800, 76800, 572416, whole, 143360, -76800}));
  EXPECT_EQ(found(PyTorchVersion::k2_15),
            (std::vector<std::int64_t>{whole, 18432, -18432, 9216, 9216, -2 * 9216, 18432, -18432, 76800,
                                       76800, -2 * 76800, 76800, -76800, 572416, whole, 143360}));
}

}  // namespace
}  // namespace shardplan::test
