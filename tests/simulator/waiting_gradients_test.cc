// SPDX-License-Identifier: Apache-2.0
// Gradients that wait for a later backward, widened and added up: simulator/src/memory/gradient_arrivals.h.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/simulator/memory_history.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

AllocateEvent Made(StorageId storage, std::int64_t bytes, StorageRole role = StorageRole::kBackwardTemp) {
  return {.storage = storage, .size_bytes = Bytes{bytes}, .role = role};
}
OperatorEvent Runs(std::string name, std::vector<StorageId> reads, std::vector<StorageId> writes) {
  return {.name = std::move(name),
          .dtype = DType::kBFloat16,
          .reads = std::move(reads),
          .writes = std::move(writes)};
}

// A unit of a weight and a norm, in bfloat16 reduced in float32. The first micro-batch widens their
// gradients, the second adds to them.
Plan TwoMicrobatches(PyTorchVersion pytorch, std::vector<SegmentEntry> entries) {
  PlanBuilder b(2);
  b.plan().strategy.pytorch = pytorch;
  const UnitId unit = b.Unit("a", 2, 1'024);
  b.plan().units[0].parameters[1].shape = {512};
  std::vector<BufferId> made, sums;
  for (const std::int32_t p : {0, 1}) {
    const std::int64_t elements = p == 0 ? 1'024 : 512;
    for (const bool sum : {false, true}) {
      const BufferRole role = sum ? BufferRole::kGradUnshardedAccumulated : BufferRole::kGradUnsharded;
      const BufferId id = b.Buffer(role, unit, sum ? DType::kFloat32 : DType::kBFloat16);
      b.plan().buffers[static_cast<std::size_t>(id)].parameters = {p};
      b.plan().buffers[static_cast<std::size_t>(id)].parts_bytes = {Bytes{elements * (sum ? 4 : 2)}};
      (sum ? sums : made).push_back(id);
    }
  }
  const SegmentId backward = b.Backward("backward a", {unit}, {{unit, 0}, {unit, 1}});
  b.plan().segments[0].entries = std::move(entries);
  b.Step("steady");
  for (const std::int32_t microbatch : {0, 1}) {
    b.At(TriggerKind::kPreBackward, unit, microbatch).Compute(backward, 0, microbatch);
    b.At(TriggerKind::kPostBackward, unit, microbatch);
    for (std::size_t p = 0; p < 2; ++p) {
      if (microbatch == 0) b.Allocate(sums[p], 0);
      b.Move(microbatch == 0 ? InstructionKind::kGradCast : InstructionKind::kGradAccumulate, made[p],
             sums[p], 0);
      b.Free(made[p]);
    }
  }
  b.Free(sums[0]).Free(sums[1]);
  return b.plan();
}

// The recorded actions in order: bytes that are allocated, and below 0 that are freed.
std::vector<std::int64_t> Actions(const Plan& plan) {
  const MemoryHistory history = MemoryHistoryOf(plan);
  std::vector<std::int64_t> bytes;
  for (std::size_t a = history.first_recorded; a < history.actions.size(); ++a) {
    const MemoryAction& action = history.actions[a];
    const std::int64_t of_block =
        history.blocks[static_cast<std::size_t>(action.block)].requested_bytes.value;
    bytes.push_back(action.frees ? -of_block : of_block);
  }
  return bytes;
}

constexpr std::int64_t kWeight = 2'048, kNorm = 1'024;  // narrow; wide ones have twice that
constexpr std::int64_t kOutput = 10, kInput = 20, kNext = 30;

// A product, and a norm that made its input: 0 is the gradient of the product's output, 2 of its input, 4 of
// the norm's.
std::vector<SegmentEntry> ProductAndNorm() {
  return {Made(0, kOutput),
          Made(1, kWeight, StorageRole::kParameterGrad),
          Runs("aten.mm", {0, 9}, {1}),
          Made(2, kInput),
          Runs("aten.mm", {0}, {2}),
          FreeEvent{0},
          Made(4, kNext),
          Made(3, kNorm, StorageRole::kParameterGrad),
          Runs("aten._fused_rms_norm_backward", {2, 8}, {4, 3}),
          FreeEvent{2},
          FreeEvent{4}};
}

TEST(WaitingGradients, AreWidenedAndAddedOneByOneFrom215On) {
  // The weight's is widened behind what the product's node releases, the norm's before what its node does.
  const std::vector<std::int64_t> widened = {kOutput, kWeight, kInput,    -kOutput, 2 * kWeight, -kWeight,
                                             kNext,   kNorm,   2 * kNorm, -kNorm,   -kInput,     -kNext};
  const std::vector<std::int64_t> added = {kOutput, kWeight, kInput,  -kOutput, -kWeight,
                                           kNext,   kNorm,   -kInput, -kNext,   -kNorm};
  std::vector<std::int64_t> expected = widened;
  expected.insert(expected.end(), added.begin(), added.end());
  expected.insert(expected.end(), {-2 * kWeight, -2 * kNorm});
  EXPECT_EQ(Actions(TwoMicrobatches(PyTorchVersion::k2_15, ProductAndNorm())), expected);
}

TEST(WaitingGradients, AreWidenedTogetherBehindTheBackwardIn211) {
  const std::vector<std::int64_t> backward = {kOutput, kWeight, kInput,  -kOutput,
                                              kNext,   kNorm,   -kInput, -kNext};
  std::vector<std::int64_t> expected = backward;
  expected.insert(expected.end(), {2 * kWeight, -kWeight, 2 * kNorm, -kNorm});
  expected.insert(expected.end(), backward.begin(), backward.end());
  expected.insert(expected.end(), {-kWeight, -kNorm, -2 * kWeight, -2 * kNorm});
  EXPECT_EQ(Actions(TwoMicrobatches(PyTorchVersion::k2_11, ProductAndNorm())), expected);
}

TEST(WaitingGradients, OfAWeightComeBehindTheSumOfItsInputsGradients) {
  constexpr std::int64_t kSum = 40;
  std::vector<SegmentEntry> entries = ProductAndNorm();
  // Another product had the same input: 7 is what that sent.
  entries.insert(entries.begin() + 6, {Made(6, kSum), Runs("aten.add", {7, 2}, {6}), FreeEvent{6}});
  const std::vector<std::int64_t> actions = Actions(TwoMicrobatches(PyTorchVersion::k2_15, entries));
  ASSERT_GT(actions.size(), 8U);
  EXPECT_EQ(
      std::vector(actions.begin(), actions.begin() + 8),
      (std::vector<std::int64_t>{kOutput, kWeight, kInput, -kOutput, kSum, -kSum, 2 * kWeight, -kWeight}));
}

TEST(WaitingGradients, OfABiasAreWidenedWithTheirSum) {
  // The bias's sum is of the product's node, too.
  const std::vector<SegmentEntry> entries = {Made(0, kOutput),
                                             Made(1, kWeight, StorageRole::kParameterGrad),
                                             Runs("aten.mm", {0, 9}, {1}),
                                             Made(2, kInput),
                                             Runs("aten.mm", {0}, {2}),
                                             Made(3, kNorm, StorageRole::kParameterGrad),
                                             Runs("aten.sum", {0}, {3}),
                                             FreeEvent{0},
                                             FreeEvent{2}};
  const std::vector<std::int64_t> actions = Actions(TwoMicrobatches(PyTorchVersion::k2_15, entries));
  ASSERT_GT(actions.size(), 10U);
  EXPECT_EQ(std::vector(actions.begin(), actions.begin() + 10),
            (std::vector<std::int64_t>{kOutput, kWeight, kInput, kNorm, 2 * kNorm, -kNorm, -kOutput, -kInput,
                                       2 * kWeight, -kWeight}));
}

}  // namespace
}  // namespace shardplan::test
