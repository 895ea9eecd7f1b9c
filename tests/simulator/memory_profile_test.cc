// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/memory_profile.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "shardplan/schemas/optimizers.h"
#include "tests/simulator/random_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

Bytes Of(const MemoryProfile& profile, std::string_view category) {
  for (std::size_t c = 0; c < MemoryCategories().size(); ++c) {
    if (MemoryCategories()[c] == category) return profile.peak_by_category[c];
  }
  ADD_FAILURE() << "no category " << category;
  return {};
}

AllocateEvent Born(StorageId storage, std::int64_t bytes, StorageRole role) {
  return {.storage = storage, .size_bytes = Bytes{bytes}, .role = role};
}

TEST(MemoryProfile, RoundsEveryAllocationAndFindsThePeak) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 1000);  // 4,000 bytes, shards of 2,000
  b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId gathered = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const SegmentId segment = b.Forward("forward a", {unit});
  b.plan().segments[0].entries = {Born(0, 1, StorageRole::kSaved), Born(1, 513, StorageRole::kForwardTemp),
                                  FreeEvent{1}, FreeEvent{0}};
  b.Step("steady").At(TriggerKind::kPreForward, unit).Allocate(gathered, 0).Compute(segment).Free(gathered);
  const MemoryProfile profile = ProfileMemory(b.plan(), {.record_samples = true});
  EXPECT_EQ(profile.peak_bytes.value, 2'048 + 4'096 + 512 + 1'024);
  EXPECT_EQ(Of(profile, "param_sharded").value, 2'048);
  EXPECT_EQ(Of(profile, "all_gather_output").value, 4'096);
  EXPECT_EQ(Of(profile, "saved").value, 512);
  EXPECT_EQ(Of(profile, "forward_temp").value, 1'024);
  EXPECT_EQ(profile.end_bytes.value, 2'048);
  EXPECT_EQ(profile.peak_at, (MemoryPoint{0, 0, 1, 1}));
  EXPECT_EQ(ProfileMemory(b.plan(), {.granularity_bytes = Bytes{1}}).peak_bytes.value,
            2'000 + 4'000 + 1 + 513);
}

TEST(MemoryProfile, GradientsAreMadeBySegmentsAndDroppedByThePlan) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 2, 256);  // two parameters of 1,024 bytes
  const BufferId grads = b.Buffer(BufferRole::kGradUnsharded, unit);
  b.plan().buffers[0].parts_bytes = {Bytes{1'024}, Bytes{1'024}};
  const SegmentId first = b.Backward("backward a.1", {unit}, {{unit, 1}});
  const SegmentId second = b.Backward("backward a.0", {unit}, {{unit, 0}});
  // The first gradient is allocated in the middle of its segment, before a temporary; the second has no
  // event.
  b.plan().segments[0].entries = {Born(7, 1'024, StorageRole::kParameterGrad),
                                  Born(8, 512, StorageRole::kBackwardTemp), FreeEvent{8}};
  b.Step("steady")
      .At(TriggerKind::kPostBackward, unit)
      .Compute(first)
      .Compute(second)
      .Compute(second)
      .Free(grads);
  const MemoryProfile profile = ProfileMemory(b.plan(), {.record_samples = true});
  EXPECT_EQ(profile.peak_bytes.value, 2'048);
  EXPECT_EQ(Of(profile, "grad_unsharded").value, 2'048);
  EXPECT_EQ(profile.end_bytes.value, 0);
  EXPECT_EQ(profile.samples[1].total_bytes.value, 1'536);
}

TEST(MemoryProfile, AGradientThatIsAddedToAnotherIsTemporary) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 256);
  const BufferId grads = b.Buffer(BufferRole::kGradUnsharded, unit);
  const SegmentId segment = b.Backward("backward a", {unit}, {{unit, 0}});
  b.plan().segments[0].entries = {Born(7, 1'024, StorageRole::kParameterGrad)};
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Compute(segment).Compute(segment).Free(grads);
  const MemoryProfile profile = ProfileMemory(b.plan());
  EXPECT_EQ(profile.peak_bytes.value, 2'048);  // both, for a moment
  EXPECT_EQ(profile.end_bytes.value, 0);
}

TEST(MemoryProfile, ACastToTheSameTypeIsAViewThatKeepsTheMemory) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 256);
  const BufferId out = b.Buffer(BufferRole::kReduceScatterOutput, unit);
  const BufferId grad = b.Buffer(BufferRole::kGradSharded, unit);
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Allocate(out, 0);
  b.Move(InstructionKind::kGradCast, out, grad, 0).Free(out).At(TriggerKind::kZeroGrad).ZeroGrad();
  const MemoryProfile profile = ProfileMemory(b.plan(), {.record_samples = true});
  EXPECT_EQ(profile.peak_bytes.value, 512);
  EXPECT_EQ(Of(profile, "grad_sharded").value, 512);  // named by what it turns out to be
  EXPECT_EQ(profile.end_bytes.value, 0);
  ASSERT_EQ(profile.samples.size(), 2U);
  EXPECT_EQ(profile.samples[1].trigger, 1);
}

TEST(MemoryProfile, OptimizerStatesAppearAtTheFirstStepAndStay) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 2'560);  // shard 5,120 bytes
  b.Buffer(BufferRole::kParamSharded, unit);
  b.Step("steady").At(TriggerKind::kOptimizerStep).OptimizerStep(0);
  const auto peak = [&](OptimizerKind kind, OptimizerImplementation how, bool momentum = false) {
    b.plan().strategy.optimizer = {kind, how, momentum};
    return ProfileMemory(b.plan()).peak_bytes.value;
  };
  using enum OptimizerImplementation;
  EXPECT_EQ(peak(OptimizerKind::kAdamW, kForeach), 4 * 5'120);      // shard, two moments, square roots
  EXPECT_EQ(peak(OptimizerKind::kAdamW, kFused), 3 * 5'120 + 512);  // the step count on the device
  EXPECT_EQ(peak(OptimizerKind::kAdamW, kForLoop), 5 * 5'120);      // two temporaries of one parameter
  const auto temporaries = [](const std::vector<std::int64_t>& numels) {
    std::vector<OptimizerShard> shards;
    for (const std::int64_t numel : numels) shards.push_back({.shape = {numel}});
    return OptimizerTemporaries({.implementation = kForLoop}, shards);
  };
  EXPECT_EQ(temporaries({64'000, 128, 44'032, 44'032, 64'000}),
            (std::vector<Bytes>{
                {176'128}, {256'000}, {256'000}}));  // the quotient of the one before is still there
  EXPECT_EQ(temporaries({250, 2}), (std::vector<Bytes>{{1'000}, {1'000}}));
  EXPECT_EQ(peak(OptimizerKind::kSgd, kForeach), 5'120);
  EXPECT_EQ(peak(OptimizerKind::kSgd, kForeach, true), 2 * 5'120);
  EXPECT_EQ(peak(OptimizerKind::kNone, kForeach), 5'120);
  // Two steps: the first one begins without states.
  b.Step("steady").At(TriggerKind::kOptimizerStep).OptimizerStep(0);
  b.plan().strategy.optimizer = {};
  const MemoryProfile profile = ProfileMemory(b.plan(), {.record_samples = true});
  EXPECT_EQ(profile.step_peak_bytes.size(), 2U);
  EXPECT_EQ(profile.end_bytes.value, 3 * 5'120);
}

TEST(MemoryProfile, HostMemoryIsNotCounted) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 256);
  b.Buffer(BufferRole::kParamSharded, unit);
  b.plan().buffers[0].memory = MemoryKind::kPinnedHost;
  b.Step("steady").At(TriggerKind::kStepBegin);
  EXPECT_EQ(ProfileMemory(b.plan()).peak_bytes.value, 0);
}

// Independent of the profiler: a map of what is alive, summed anew after every event.
std::int64_t BruteForcePeak(const Plan& plan) {
  std::map<std::pair<int, std::int64_t>, std::int64_t> alive;
  const auto round = [](std::int64_t bytes) { return (bytes + 511) / 512 * 512; };
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (!plan.buffers[b].persistent) continue;
    for (const Bytes part : plan.buffers[b].parts_bytes)
      alive[{0, static_cast<std::int64_t>(b)}] += round(part.value);
  }
  std::int64_t peak = 0;
  const auto look = [&] {
    std::int64_t sum = 0;
    for (const auto& [key, bytes] : alive) sum += bytes;
    peak = std::max(peak, sum);
  };
  // A plan of one step is profiled in its second run.
  for (int run = 0; run < 2; ++run) {
    peak = 0;
    look();
    for (const Trigger& trigger : plan.steps[0].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllocate) {
          alive[{0, i.dst}] = round(plan.buffers[static_cast<std::size_t>(i.dst)].parts_bytes[0].value);
        } else if (i.kind == InstructionKind::kFree) {
          alive.erase({0, i.src});
        } else if (i.kind == InstructionKind::kCompute) {
          for (const SegmentEntry& entry : plan.segments[static_cast<std::size_t>(i.segment)].entries) {
            if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
              alive[{1, born->storage}] = round(born->size_bytes.value);
            } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
              alive.erase({1, dead->storage});
            }
            look();
          }
        }
        look();
      }
    }
  }
  return peak;
}

TEST(MemoryProfileProperty, PeakEqualsBruteForceAndCategoriesSumUp) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const MemoryProfile profile = ProfileMemory(plan, {.record_samples = true});
    EXPECT_EQ(profile, ProfileMemory(plan, MemoryHistoryOf(plan), {.record_samples = true}));
    EXPECT_EQ(profile.peak_bytes.value, BruteForcePeak(plan));
    std::int64_t sum = 0;
    for (const Bytes bytes : profile.peak_by_category) sum += bytes.value;
    EXPECT_EQ(sum, profile.peak_bytes.value);
    std::int64_t peak = 0;
    for (const MemorySample& sample : profile.samples) {
      ASSERT_GE(sample.category_bytes.value, 0);
      ASSERT_GE(sample.total_bytes, sample.category_bytes);
      peak = std::max(peak, sample.total_bytes.value);
    }
    if (!profile.samples.empty()) {
      EXPECT_GE(profile.peak_bytes.value, peak);
      EXPECT_EQ(profile.samples.back().total_bytes, profile.end_bytes);
    }
  }
}

}  // namespace
}  // namespace shardplan::test
