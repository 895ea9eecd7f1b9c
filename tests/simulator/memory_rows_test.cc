// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "shardplan/simulator/memory_profile.h"
#include "tests/simulator/random_plan.h"
#include "tests/support/plan_builder.h"

namespace shardplan {
namespace {

using test::PlanBuilder;

AllocateEvent BornRow(StorageId storage, std::int64_t bytes, StorageRole role) {
  return {.storage = storage, .size_bytes = Bytes{bytes}, .role = role};
}

MemoryRows Rows(const Plan& plan) { return RowsOf(plan, ProfileMemory(plan, {.record_samples = true}), 0); }

std::vector<std::pair<std::string, std::int64_t>> Totals(const MemoryRows& rows) {
  std::vector<std::pair<std::string, std::int64_t>> totals;
  for (const MemoryRow& row : rows.rows) totals.emplace_back(row.event, row.total_bytes.value);
  return totals;
}

TEST(MemoryRows, AHooksOwnWorkIsBetweenItsRowsAndTheModelsBehindThem) {
  PlanBuilder b(2);
  const UnitId root = b.Unit("", 1, 1'024);  // gathered 4,096 bytes
  const BufferId gathered = b.Buffer(BufferRole::kAllGatherOutput, root);
  const SegmentId forward = b.Forward("forward", {root});
  const SegmentId loss = b.Segment(SegmentPhase::kLoss, "loss", {});
  const SegmentId backward = b.Backward("backward loss", {});
  b.plan().segments[0].entries = {BornRow(0, 512, StorageRole::kSaved), OperatorEvent{.name = "aten.mm"}};
  b.plan().segments[1].entries = {BornRow(1, 512, StorageRole::kLossSaved)};
  b.plan().segments[2].entries = {BornRow(2, 1'024, StorageRole::kBackwardTemp),
                                  OperatorEvent{.name = "aten.nll_loss_backward"}, FreeEvent{2}, FreeEvent{1},
                                  FreeEvent{0}};
  b.Step("steady").At(TriggerKind::kPreForward, root).Allocate(gathered, 0).Compute(forward);
  b.At(TriggerKind::kPostForward, root).Compute(loss).Compute(backward);
  b.At(TriggerKind::kBackwardEnd).Free(gathered);
  b.Compute(b.Backward("backward returns", {}));
  const MemoryRows rows = Rows(b.plan());
  const std::vector<std::pair<std::string, std::int64_t>> expected = {{"step_begin", 0},
                                                                      {"pre_forward.before", 0},
                                                                      {"pre_forward.after", 4'096},
                                                                      {"post_forward.before", 4'608},
                                                                      {"post_forward.after", 4'608},
                                                                      {"forward_end", 4'608},
                                                                      {"loss_end", 5'120},
                                                                      {"backward_end.before", 4'096},
                                                                      // Its end runs what has not run.
                                                                      {"post_backward.before", 4'096},
                                                                      {"post_backward.after", 4'096},
                                                                      {"backward_end.after", 0},
                                                                      {"backward_returned", 0},
                                                                      {"step_end", 0}};
  EXPECT_EQ(Totals(rows), expected);
  EXPECT_EQ(rows.peak.total_bytes.value, 4'096 + 512 + 512 + 1'024);
  EXPECT_EQ(rows.peak.phase, "backward");
  EXPECT_EQ(rows.peak.unit, root);
  EXPECT_EQ(rows.peak.allocation, "aten.nll_loss_backward");
  EXPECT_EQ(rows.peak.at, (MemoryPoint{0, 1, 1, 0}));
}

TEST(MemoryRows, AfterAnInnerUnitsForwardThePeakIsTheEnclosingUnits) {
  PlanBuilder b(2);
  const UnitId root = b.Unit("", 1, 1'024);
  const UnitId inner = b.Unit("layers.0", 1, 1'024);
  b.Forward("forward layers.0", {inner});
  b.Forward("forward (root)", {root});
  b.plan().segments[0].entries = {BornRow(0, 512, StorageRole::kSaved)};
  b.plan().segments[1].entries = {BornRow(1, 1'024, StorageRole::kOutput), OperatorEvent{.name = "aten.mm"},
                                  FreeEvent{1}, FreeEvent{0}};
  b.Step("steady").At(TriggerKind::kPreForward, root).At(TriggerKind::kPreForward, inner).Compute(0);
  b.At(TriggerKind::kPostForward, inner).Compute(1).At(TriggerKind::kPostForward, root);
  const MemoryRows rows = Rows(b.plan());
  EXPECT_EQ(rows.peak.unit, root);
  EXPECT_EQ(rows.peak.phase, "forward");
  EXPECT_EQ(rows.peak.total_bytes.value, 1'536);
}

TEST(MemoryRows, AnExplicitPrefetchFollowsTheHooksRow) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 1'024);
  const BufferId own = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const BufferId next = b.Buffer(BufferRole::kParamUnsharded, unit);
  b.Step("steady").At(TriggerKind::kPreBackward, unit).Allocate(own, 0);
  b.Do(
      {.kind = InstructionKind::kAllocate, .stream = 0, .dst = next, .reason = "prefetch_backward_explicit"});
  b.At(TriggerKind::kPostBackward, unit).Free(own).Free(next);
  const std::vector<std::pair<std::string, std::int64_t>> expected = {{"step_begin", 0},
                                                                      {"pre_backward.before", 0},
                                                                      {"pre_backward.after", 4'096},
                                                                      {"post_backward.before", 8'192},
                                                                      {"post_backward.after", 0},
                                                                      {"step_end", 0}};
  EXPECT_EQ(Totals(Rows(b.plan())), expected);
}

TEST(MemoryRows, ReductionsAtTheEndOfTheBackwardHaveRowsOfTheirOwn) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 1, 1'024);
  const BufferId input = b.Buffer(BufferRole::kReduceScatterInput, unit);
  b.Step("steady").At(TriggerKind::kBackwardEnd);
  b.Do({.kind = InstructionKind::kAllocate, .stream = 0, .unit = unit, .dst = input, .reason = "final"});
  b.Do({.kind = InstructionKind::kFree, .unit = unit, .src = input, .reason = "finalize"});
  const std::vector<std::pair<std::string, std::int64_t>> expected = {{"step_begin", 0},
                                                                      {"backward_end.before", 0},
                                                                      {"post_backward.before", 0},
                                                                      {"post_backward.after", 4'096},
                                                                      {"backward_end.after", 0},
                                                                      {"backward_returned", 0},
                                                                      {"step_end", 0}};
  EXPECT_EQ(Totals(Rows(b.plan())), expected);
}

TEST(MemoryRows, EveryMicroBatchHasItsInputsFromTheBeginning) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a");
  b.plan().inputs.push_back({.name = "tokens", .shape = {1, 100}, .dtype = DType::kInt64});
  b.Step("steady").At(TriggerKind::kPreForward, unit, 0).At(TriggerKind::kPreForward, unit, 2);
  const MemoryRows rows = Rows(b.plan());
  EXPECT_EQ(rows.rows.front().total_bytes.value, 3 * 1'024);
  EXPECT_EQ(rows.rows.back().total_bytes.value, 0);
}

TEST(MemoryRows, ACastGradientIsOneAllocationForAllParameters) {
  PlanBuilder b(2);
  const UnitId unit = b.Unit("a", 2, 200);
  const BufferId grad = b.Buffer(BufferRole::kGradSharded, unit);
  b.plan().buffers[0].parts_bytes = {Bytes{400}, Bytes{400}};
  b.Step("steady").At(TriggerKind::kPostBackward, unit).Allocate(grad, 0);
  EXPECT_EQ(Rows(b.plan()).peak.total_bytes.value, 1'024);  // 800 rounded, not 400 twice
  b.plan().buffers[0].parts_bytes = {Bytes{100}, Bytes{100}};
  EXPECT_EQ(Rows(b.plan()).peak.total_bytes.value, 512);
}

// Everything before the step is a sample of each category.
TEST(MemoryRowsProperty, SamplesOfTheStepAloneAreEnough) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Plan plan = test::RandomPlan(seed);
    plan.steps.push_back(plan.steps.back());
    const auto last = static_cast<std::int32_t>(plan.steps.size()) - 1;
    for (std::int32_t step = 0; step <= last; ++step) {
      const MemoryRows all = RowsOf(plan, ProfileMemory(plan, {.record_samples = true}), step);
      const MemoryProfile later = ProfileMemory(plan, {.record_samples = true, .first_sampled_step = step});
      const MemoryRows of_later = RowsOf(plan, later, step);
      EXPECT_EQ(of_later.rows, all.rows) << "seed " << seed << ", step " << step;
      EXPECT_EQ(of_later.peak, all.peak) << "seed " << seed << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace shardplan
