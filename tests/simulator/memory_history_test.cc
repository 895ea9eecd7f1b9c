// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/memory_history.h"

#include <gtest/gtest.h>

#include <map>

#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "tests/simulator/random_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

AllocateEvent BornBlock(StorageId storage, std::int64_t bytes, StorageRole role) {
  return {.storage = storage, .size_bytes = Bytes{bytes}, .role = role};
}
OperatorEvent Op(std::string name, std::vector<StorageId> reads, std::vector<StorageId> writes,
                 std::int64_t flops = 0) {
  return {.name = std::move(name),
          .dtype = DType::kBFloat16,
          .flops = flops,
          .reads = std::move(reads),
          .writes = std::move(writes)};
}
std::string CategoryOf(const MemoryBlock& block) {
  return MemoryCategories()[static_cast<std::size_t>(block.category)];
}

TEST(MemoryHistory, EveryBlockIsBornOnceAndDiesAtMostOnce) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const MemoryHistory history = MemoryHistoryOf(RandomPlan(seed), {.kernel_temporaries = true});
    std::vector<int> births(history.blocks.size()), deaths(history.blocks.size());
    for (std::size_t a = 0; a < history.actions.size(); ++a) {
      const MemoryAction& action = history.actions[a];
      const auto b = static_cast<std::size_t>(action.block);
      EXPECT_EQ(action.frees ? history.blocks[b].died : history.blocks[b].born, static_cast<std::int32_t>(a));
      ++(action.frees ? deaths : births)[b];
    }
    for (std::size_t b = 0; b < births.size(); ++b) {
      EXPECT_EQ(births[b], 1);
      EXPECT_LE(deaths[b], 1);
      EXPECT_TRUE(history.blocks[b].died < 0 || history.blocks[b].died > history.blocks[b].born);
    }
  }
}

TEST(MemoryHistory, AGradientBelongsToItsUnitsBufferFromTheMomentItIsAllocated) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 2, 256);
  const BufferId grads = b.Buffer(BufferRole::kGradUnsharded, unit);
  b.plan().buffers[0].parts_bytes = {Bytes{1'024}, Bytes{2'048}};
  const SegmentId segment = b.Backward("backward a", {unit}, {{unit, 1}, {unit, 0}});
  b.plan().segments[0].entries = {BornBlock(7, 2'048, StorageRole::kParameterGrad),
                                  BornBlock(8, 1'024, StorageRole::kParameterGrad)};
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Compute(segment).Free(grads);
  const MemoryHistory history = MemoryHistoryOf(b.plan());
  const std::size_t half = history.blocks.size() / 2;  // the first run is before the recorded one
  ASSERT_EQ(history.blocks.size(), 4U);
  EXPECT_EQ(history.first_recorded, 4U);
  EXPECT_EQ(history.blocks[half].part, 1);
  EXPECT_EQ(history.blocks[half + 1].part, 0);
  EXPECT_EQ(history.blocks[half].buffer, grads);
  EXPECT_EQ(history.blocks[half].unit, unit);
}

TEST(MemoryHistory, WhatASegmentAllocatesBelongsToItsUnitWhateverItIsCalled) {
  PlanBuilder b(2);
  const UnitId root = b.Unit("", 1, 256);
  const UnitId layer = b.Unit("layers.0", 1, 256);
  for (const UnitId unit : {root, layer, -1, layer, root}) {
    b.Forward("loss", {});
    b.plan().segments.back().unit = unit;
    b.plan().segments.back().entries = {BornBlock(0, 512, StorageRole::kForwardTemp), FreeEvent{0}};
  }
  b.Step("steady").At(TriggerKind::kPreForward, root);
  for (SegmentId s = 0; s < 5; ++s) b.Compute(s);
  const MemoryHistory history = MemoryHistoryOf(b.plan());
  ASSERT_EQ(history.blocks.size(), 10U);
  std::vector<UnitId> units;
  for (std::size_t i = 5; i < 10; ++i) units.push_back(history.blocks[i].unit);
  EXPECT_EQ(units, (std::vector<UnitId>{root, layer, -1, layer, root}));
}

// Sizes of one category that are requested in the second run, in order.
std::vector<std::int64_t> Requested(const MemoryHistory& history, std::string_view category,
                                    bool all = false) {
  std::vector<std::int64_t> sizes;
  for (const MemoryBlock& block : history.blocks) {
    const bool recorded = all || static_cast<std::size_t>(block.born) >= history.first_recorded;
    if (recorded && CategoryOf(block) == category) sizes.push_back(block.requested_bytes.value);
  }
  return sizes;
}

TEST(KernelMemory, FlashBackwardTakesItsAccumulators) {
  // B 2, H 4, S 100, D 40, 2 key and value heads; bf16.
  constexpr std::int64_t kQ = 2LL * 4 * 100 * 40, kKv = kQ / 2, kLse = 2LL * 4 * 100;
  PlanBuilder b(1);
  b.Backward("backward (root)", {});
  b.plan().segments[0].entries = {BornBlock(0, 2 * kQ, StorageRole::kSaved),
                                  BornBlock(1, 2 * kQ, StorageRole::kSaved),
                                  BornBlock(2, 2 * kKv, StorageRole::kSaved),
                                  BornBlock(3, 2 * kKv, StorageRole::kSaved),
                                  BornBlock(4, 2 * kQ, StorageRole::kSaved),
                                  BornBlock(5, 4 * kLse, StorageRole::kSaved),
                                  BornBlock(6, 16, StorageRole::kSaved),
                                  BornBlock(7, 8, StorageRole::kSaved),
                                  BornBlock(8, 2 * kQ, StorageRole::kSaved),
                                  BornBlock(9, 2 * kKv, StorageRole::kSaved),
                                  BornBlock(10, 2 * kKv, StorageRole::kSaved),
                                  Op("aten._scaled_dot_product_flash_attention_backward",
                                     {0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10}, 10 * kQ * 100)};
  b.Step("steady").At(TriggerKind::kPreBackward).Compute(0);
  const auto sizes = Requested(MemoryHistoryOf(b.plan(), {.kernel_temporaries = true}), "kernel_temp");
  // softmax_d and dq_accum with S up to 128 and D up to 64, dk and dv of all 4 heads.
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{4LL * 2 * 4 * 128, 4LL * 2 * 4 * 128 * 64, 2 * kQ, 2 * kQ}));
  EXPECT_TRUE(Requested(MemoryHistoryOf(b.plan()), "kernel_temp").empty());
  // The model has as many key and value heads as query heads: nothing is expanded.
  for (const std::size_t e : {2U, 3U, 9U, 10U}) {
    std::get<AllocateEvent>(b.plan().segments[0].entries[e]).size_bytes = Bytes{2 * kQ};
  }
  EXPECT_EQ(Requested(MemoryHistoryOf(b.plan(), {.kernel_temporaries = true}), "kernel_temp").size(), 2U);
}

TEST(KernelMemory, EmbeddingBackwardSortsManyIndicesOnly) {
  PlanBuilder b(1);
  b.Backward("backward (root)", {});
  const auto sizes = [&](std::int64_t indices) {
    b.plan().segments[0].entries = {BornBlock(0, indices * 64 * 2, StorageRole::kBackwardTemp),
                                    BornBlock(1, indices * 8, StorageRole::kBackwardTemp),
                                    BornBlock(2, 1'000 * 64 * 2, StorageRole::kBackwardTemp),
                                    Op("aten.embedding_dense_backward", {0, 1}, {2}),
                                    FreeEvent{0},
                                    FreeEvent{1},
                                    FreeEvent{2}};
    return Requested(MemoryHistoryOf(b.plan(), {.kernel_temporaries = true}), "kernel_temp");
  };
  b.Step("steady").At(TriggerKind::kPreBackward).Compute(0);
  EXPECT_TRUE(sizes(3'072).empty());
  const auto many = sizes(4'000);
  ASSERT_EQ(many.size(), 14U);
  EXPECT_EQ(many.back(), (4'000 / 10 + 1'000) * 64 * 4);  // at most 1,000 different rows, in float
}

TEST(KernelMemory, FlashForwardSplitsKeysWhereMultiprocessorsWouldIdle) {
  constexpr std::int64_t kElements =
      8LL * 512 * 64;  // 8 heads, 512 tokens, a dimension of 64; two blocks of keys
  PlanBuilder b(1);
  b.Forward("forward (root)", {});
  b.plan().segments[0].entries = {
      BornBlock(0, 2 * kElements, StorageRole::kSaved), BornBlock(1, 4LL * 8 * 512, StorageRole::kSaved),
      Op("aten._scaled_dot_product_flash_attention", {}, {0, 1}, 4 * kElements * 512)};
  std::get<OperatorEvent>(b.plan().segments[0].entries[2]).reads = {0};
  b.Step("steady").At(TriggerKind::kPreForward).Compute(0);
  const auto taken = [&](std::string name, std::int32_t multiprocessors) {
    b.plan().cluster.device.name = std::move(name);
    b.plan().cluster.device.multiprocessors = multiprocessors;
    return Requested(MemoryHistoryOf(b.plan(), {.kernel_temporaries = true}), "kernel_temp");
  };
  const std::vector<std::int64_t> two_splits = {2LL * 4 * 8 * 512, 2LL * 4 * kElements};
  EXPECT_EQ(taken("H100", 0), two_splits);
  EXPECT_EQ(taken("A100", 0), two_splits);
  EXPECT_EQ(taken("H100", 80), two_splits);
  // Two splits of 64 blocks fill two rounds of 82 no better than one fills one; 64 are four fifths of 80.
  EXPECT_TRUE(taken("H100", 41).empty());
  EXPECT_TRUE(taken("H100", 40).empty());
}

TEST(KernelMemory, EachThreadsCublasHandleTakesOneWorkspaceForEver) {
  PlanBuilder b(1);
  b.Forward("forward (root)", {});
  b.Backward("backward (root)", {});
  b.plan().segments[0].entries =
      b.plan().segments[1].entries = {Op("aten.mm", {}, {}), Op("aten.addmm", {}, {})};
  b.Step("steady").At(TriggerKind::kPreForward).Compute(0).Compute(1);
  b.plan().cluster.device.name = "H100 SXM 80GB";
  const std::vector<std::int64_t> two = {32 << 20, 32 << 20};
  EXPECT_EQ(Requested(MemoryHistoryOf(b.plan(), {.kernel_temporaries = true}), "cublas_workspace", true),
            two);
  b.plan().cluster.device.name = "A100 80GB";
  const MemoryProfile profile = ProfileMemory(b.plan(), {.kernel_temporaries = true});
  EXPECT_EQ(profile.end_bytes.value, 2 * 8'519'680);
}

TEST(KernelMemory, ProductsOf215GiveTheirWorkspaceBack) {
  PlanBuilder b(1);
  b.Forward("forward (root)", {});
  b.plan().segments[0].entries = {Op("aten.mm", {}, {}), Op("aten.dot", {}, {})};
  b.Step("steady").At(TriggerKind::kPreForward).Compute(0);
  b.plan().cluster.device.name = "H100 SXM 80GB";
  b.plan().strategy.pytorch = PyTorchVersion::k2_15;
  for (const char* policy : {"fsdp1", "fsdp2", "one_of_my_own"}) {
    b.plan().strategy.policy = policy;
    const MemoryProfile profile = ProfileMemory(b.plan(), {.kernel_temporaries = true});
    EXPECT_EQ(profile.peak_bytes.value, 32 << 20) << policy;
    EXPECT_EQ(profile.end_bytes.value, 0) << policy;
  }
}

TEST(MemoryHistory, TemporariesOfALoopAreTakenOneAfterTheOther) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 3, 2'560);
  for (std::size_t p = 0; p < 3; ++p) {
    b.plan().units[0].parameters[p].index = 2 - static_cast<std::int32_t>(p);
    b.plan().units[0].parameters[p].shape = {256, static_cast<std::int64_t>(p) + 1};
  }
  b.Buffer(BufferRole::kParamSharded, unit);
  b.plan().strategy.optimizer = {OptimizerKind::kAdamW, OptimizerImplementation::kForLoop};
  constexpr BufferId kTemporary = 1;
  b.plan().buffers.push_back({.name = "optimizer.temp", .role = BufferRole::kOptimizerTemp});
  std::vector<Bytes>& most = b.plan().buffers[kTemporary].parts_bytes;
  b.Step("steady").At(TriggerKind::kOptimizerStep).Allocate(kTemporary, 0).OptimizerStep(0).Free(kTemporary);
  // The quotients have 128 x 1, 128 x 2 and 128 x 3 floats; the last parameter is the model's first. A
  // quotient stays until there is the next one.
  most = {Bytes{1'536}, Bytes{1'024}, Bytes{1'024}};
  EXPECT_EQ(Requested(MemoryHistoryOf(b.plan()), "optimizer_temp"),
            (std::vector<std::int64_t>{1'536, 1'536, 1'024, 1'024, 512, 512}));
  const std::int64_t peak = ProfileMemory(b.plan()).peak_bytes.value;
  most = {Bytes{4'096}};  // a plan that knows better is believed
  EXPECT_EQ(Requested(MemoryHistoryOf(b.plan()), "optimizer_temp"), (std::vector<std::int64_t>{4'096}));
  EXPECT_EQ(ProfileMemory(b.plan()).peak_bytes.value - peak, 4'096 - 3'584);
}

TEST(MemoryHistory, StepsMayEndBeforeThoseThatRepeat) {
  PlanBuilder b(2);
  const BufferId buffer = b.Buffer(BufferRole::kAllGatherOutput, b.Unit("a", 1, 256));
  for (const char* name : {"first", "step 1", "steady"}) {
    b.Step(name).At(TriggerKind::kPreForward).Allocate(buffer, 0).Free(buffer);
  }
  b.plan().steady_step = 2;
  const auto steps = [&](std::int32_t asked) {
    const SteadyReplay replay = ReplayUntilSteady(b.plan(), {}, {}, asked);
    std::vector<std::int32_t> seen;
    for (const MemoryAction& action : replay.history.actions) {
      if (!action.frees) seen.push_back(action.at.step);
    }
    return seen;
  };
  EXPECT_EQ(steps(1), (std::vector<std::int32_t>{0}));
  EXPECT_EQ(steps(2), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(steps(3), (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(steps(5), (std::vector<std::int32_t>{0, 1, 2, 2, 2}));
  EXPECT_EQ(ReserveUntilSteady(b.plan(), {}, {}, 2).rows.front().event, "step_begin");
}

TEST(MemoryHistory, AFreeOfPartsLeavesTheOthers) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 3, 256);
  const BufferId grads = b.Buffer(BufferRole::kGradUnsharded, unit);
  b.plan().buffers[0].parts_bytes = {Bytes{1'024}, Bytes{2'048}, Bytes{4'096}};
  const BufferId other = b.Buffer(BufferRole::kReduceScatterOutput, unit);
  const SegmentId segment = b.Backward("backward a", {unit}, {{unit, 0}, {unit, 1}, {unit, 2}});
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Compute(segment).FreeParts(grads, {0, 2});
  b.Allocate(other, 0).Free(grads).Free(other);
  const MemoryHistory history = MemoryHistoryOf(b.plan());
  std::vector<std::string> order;  // of the steady step
  for (std::size_t a = history.first_recorded; a < history.actions.size(); ++a) {
    const MemoryBlock& block = history.blocks[static_cast<std::size_t>(history.actions[a].block)];
    const std::string name = block.buffer == grads ? "part " + std::to_string(block.part) : "other";
    order.push_back((history.actions[a].frees ? "- " : "+ ") + name);
  }
  const std::vector<std::string> expected = {"+ part 0", "+ part 1", "+ part 2", "- part 0",
                                             "- part 2", "+ other",  "- part 1", "- other"};
  EXPECT_EQ(order, expected);
}

TEST(ReservedMemory, SegmentsAreThoseOfTheAllocator) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 3 << 20);  // 12 MiB unsharded, shards of 6 MiB
  b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId gathered = b.Buffer(BufferRole::kAllGatherOutput, unit);
  b.Step("steady").At(TriggerKind::kPreForward, unit).Allocate(gathered, 0).Free(gathered);
  const MemoryHistory history = MemoryHistoryOf(b.plan());
  const ReservedMemory reserved = ReserveMemory(b.plan(), history, {.record_addresses = true});
  // 6 MiB take 20 MiB of which 14 MiB are left: the gathered 12 MiB lie in them.
  EXPECT_EQ(reserved.peak_reserved_bytes.value, 20 << 20);
  EXPECT_EQ(reserved.allocated_at_peak_bytes.value, 18 << 20);
  EXPECT_EQ(reserved.FragmentationPpm(), 100'000);
  ASSERT_EQ(reserved.segments.size(), 1U);
  EXPECT_EQ(reserved.placements[1].address, reserved.placements[0].address + (6 << 20));
  ASSERT_EQ(reserved.map_at_peak.size(), 1U);
  // Too little memory: the request that fails is named.
  const ReservedMemory none = ReserveMemory(b.plan(), history, {.device_bytes = Bytes{10 << 20}});
  EXPECT_TRUE(none.out_of_memory);
  EXPECT_EQ(none.out_of_memory_at.step, -1);
}

TEST(ReservedMemory, AFreeThatWaitsForAStreamIsDoneWhenTheHostHasWaited) {
  // Buffer a is freed while `other` may still read it; b takes its place only after a host_wait.
  const auto reserved = [](bool wait) {
    PlanBuilder b(2);
    const UnitId unit = b.Unit("a", 1, 8 << 20);
    const BufferId first = b.Buffer(BufferRole::kAllGatherOutput, unit);
    const BufferId second = b.Buffer(BufferRole::kReduceScatterInput, unit);
    b.plan().buffers[0].parts_bytes = b.plan().buffers[1].parts_bytes = {Bytes{32 << 20}};
    b.plan().streams = {{"compute", 0}, {"other", 0}};
    b.plan().events = {"done"};
    b.Step("steady").At(TriggerKind::kPreForward, unit).Allocate(first, 0).Free(first);
    std::vector<Instruction>& code = b.plan().steps[0].triggers[0].instructions.Edit();
    code.back().safe_after = {1};
    code.push_back({.kind = InstructionKind::kRecord, .stream = 1, .event = 0});
    if (wait) code.push_back({.kind = InstructionKind::kHostWait, .event = 0});
    b.Allocate(second, 0).Free(second);
    return ReserveMemory(b.plan(), MemoryHistoryOf(b.plan())).peak_reserved_bytes.value;
  };
  EXPECT_EQ(reserved(true), 32 << 20);
  EXPECT_EQ(reserved(false), 64 << 20);
}

TEST(ReservedMemoryProperty, ReservedCoversAllocatedAndSettingsKeepAllocated) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const MemoryHistory history = MemoryHistoryOf(plan);
    const ReservedMemory reserved = ReserveMemory(plan, history);
    EXPECT_FALSE(reserved.out_of_memory);
    EXPECT_GE(reserved.peak_reserved_bytes, reserved.peak_allocated_bytes);
    EXPECT_GE(reserved.peak_allocated_bytes, ProfileMemory(plan, history).peak_bytes);
    for (const SettingsTrial& trial : TryAllocatorSettings(plan, history)) {
      ReservedOptions options;
      options.settings = trial.settings;
      EXPECT_EQ(ReserveMemory(plan, history, options).peak_reserved_bytes, trial.peak_reserved_bytes)
          << trial.text;
    }
  }
}

TEST(MemoryExplanationProperty, WhatIsAliveSumsUpToThePeak) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = RandomPlan(seed);
    const MemoryHistory history = MemoryHistoryOf(plan);
    const MemoryExplanation explanation = ExplainMemory(plan, history);
    Bytes alive, units;
    for (const AliveMemory& a : explanation.alive) {
      alive += a.bytes;
      EXPECT_GE(a.bytes, a.knob_bytes);
    }
    for (const UnitMemory& unit : explanation.units) {
      units += unit.at_peak_bytes;
      EXPECT_GE(unit.highest_bytes, unit.at_peak_bytes);
    }
    if (explanation.peak_action < 0) continue;
    EXPECT_EQ(alive, explanation.peak_bytes);
    EXPECT_EQ(units, explanation.peak_bytes);
    EXPECT_EQ(explanation.peak_bytes, ProfileMemory(plan, history).peak_bytes);
  }
}

TEST(MemoryExplanation, NamesTheKnobThatRemovesTheRootsParameters) {
  PlanBuilder b(2);
  const UnitId root = b.Unit("", 1, 1 << 20);
  const UnitId layer = b.Unit("layers.0", 1, 1 << 10);
  const BufferId kept = b.Buffer(BufferRole::kParamUnsharded, root);
  const BufferId used = b.Buffer(BufferRole::kParamUnsharded, layer);
  const SegmentId segment = b.Backward("backward layers.0", {layer});
  b.plan().segments[0].entries = {BornBlock(0, 512, StorageRole::kBackwardTemp), Op("aten.mul", {}, {0}),
                                  FreeEvent{0}};
  b.Step("steady").At(TriggerKind::kPreForward, root).Allocate(kept, 0).Allocate(used, 0);
  b.At(TriggerKind::kPreBackward, layer).Compute(segment).Free(used).Free(kept);
  const MemoryExplanation explanation = ExplainMemory(b.plan(), MemoryHistoryOf(b.plan()));
  ASSERT_EQ(explanation.alive.size(), 3U);
  EXPECT_EQ(explanation.alive[0].knob, "reshard_after_forward: true for (root)");
  EXPECT_EQ(explanation.alive[0].knob_bytes.value, 4 << 20);
  EXPECT_EQ(explanation.alive[0].since, (MemoryPoint{0, 0, 0, -1}));
  EXPECT_EQ(explanation.alive[0].until, (MemoryPoint{0, 1, 2, -1}));
  EXPECT_TRUE(explanation.alive[1].in_use);
  EXPECT_EQ(explanation.alive[1].knob_bytes.value, 0);
  EXPECT_EQ(explanation.allocation, "aten.mul");
  EXPECT_EQ(explanation.peak_text, "backward layers.0, after pre_backward layers.0");
  b.plan().policy = "fsdp1";  // has no such knob
  EXPECT_EQ(ExplainMemory(b.plan(), MemoryHistoryOf(b.plan())).alive[0].knob,
            "units of their own for the modules of (root)");
}

// A knob that is set already is no advice, and a gradient that every backward makes is not accumulated.
TEST(MemoryExplanation, NamesNoKnobThatChangesNothing) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 1 << 20);
  const BufferId gathered = b.Buffer(BufferRole::kParamUnsharded, unit);
  const BufferId grad = b.Buffer(BufferRole::kGradUnshardedAccumulated, unit);
  const BufferId shard = b.Buffer(BufferRole::kGradSharded, unit);
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Allocate(gathered, 0).Allocate(grad, 0);
  b.Allocate(shard, 0).Free(grad).Free(gathered).Free(shard);
  const auto knobs = [&] {
    std::vector<std::string> found(3);
    for (const AliveMemory& alive : ExplainMemory(b.plan(), MemoryHistoryOf(b.plan())).alive) {
      found[alive.category == "param_unsharded" ? 0 : alive.category == "grad_sharded" ? 2 : 1] = alive.knob;
    }
    return found;
  };
  const std::string own = "units of their own for the modules of a";
  const std::string offload = "cpu_offload: true (twice the shard ranks: half of it)";
  EXPECT_EQ(knobs(), (std::vector<std::string>{"reshard_after_forward: true for a", own, offload}));
  b.plan().policy = "fsdp1";
  b.plan().strategy.cpu_offload = true;
  b.plan().strategy.program = {{ModuleCall{.method = "no_sync", .value = true}}};
  EXPECT_EQ(knobs(), (std::vector<std::string>{"no prefetch, forward or backward",
                                               "accumulation with gradient sync in every micro-batch",
                                               "on its way to the host"}));
  b.plan().strategy.fsdp1.sharding = Fsdp1Sharding::kShardGradOp;
  EXPECT_EQ(knobs()[0], "sharding: full_shard");
}

TEST(MemoryPage, HoldsEveryBlockOfTheStepAndNoForeignScript) {
  const Plan plan = RandomPlan(3);
  const MemoryHistory history = MemoryHistoryOf(plan);
  const ReservedMemory reserved = ReserveMemory(plan, history, {.record_addresses = true});
  const std::string page = MemoryHtml(plan, history, &reserved);
  EXPECT_EQ(page.find("src="), std::string::npos);
  EXPECT_EQ(page.find("http"), std::string::npos);
  EXPECT_NE(page.find("\"segments\":[["), std::string::npos);
  EXPECT_NE(MemoryHtml(plan, history).find("\"segments\":[]"), std::string::npos);
  EXPECT_EQ(page, MemoryHtml(plan, history, &reserved));
}

}  // namespace
}  // namespace shardplan::test
