// SPDX-License-Identifier: Apache-2.0
// Activations in host memory between forward and backward: what goes, when, and what it frees.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "shardplan/planner/fsdp2_settings.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/planner/planner.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/parts_cases.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::TraceOf;
using testing::TreeModule;

constexpr int kOffloadBlocks = 5;

// Blocks of three operators: the first two save a tensor for the block's backward, the third one's is the
// block's output.
Trace OffloadedBlocks(bool with_head = false) {
  TreeModule list{.name = "blocks", .class_name = "ModuleList"};
  for (int i = 0; i < kOffloadBlocks; ++i) {
    TreeModule block{.name = std::to_string(i)};
    for (const char* name : {"x", "y", "z"}) block.children.push_back({.name = name, .parameters = {{4, 4}}});
    list.children.push_back(std::move(block));
  }
  TreeModule root{.children = {{.name = "embed", .parameters = {{4, 4}}}, list}};
  if (with_head) root.children.push_back({.name = "head", .parameters = {{4, 4}}});
  return TraceOf(root);
}

Strategy Offloading(std::vector<std::string> modules, std::int64_t every = 1) {
  Strategy strategy;
  strategy.units = {{.modules = {"blocks.*"}}, {.modules = {""}}};
  strategy.activation_offload =
      ActivationOffload{.modules = std::move(modules), .every = every, .min_bytes = {0}};
  return strategy;
}

Plan OffloadingPlan(const Trace& trace, const Strategy& strategy) {
  Result<PlannerOutput> made = MakePlan(trace, strategy, ClusterOf(2));
  EXPECT_TRUE(made) << (made ? "" : ToString(made.error()));
  return made ? std::move(made->plan) : Plan{};
}

std::string OffloadError(const Trace& trace, const Strategy& strategy) {
  const Result<PlannerOutput> made = MakePlan(trace, strategy, ClusterOf(2));
  return made ? "" : ToString(made.error());
}

// "out 0 at post_forward 0", in the order of the step that repeats.
std::vector<std::string> ActivationMoves(const Plan& plan) {
  std::vector<std::string> moves;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) {
      const std::map<InstructionKind, std::pair<const char*, BufferId>> of = {
          {InstructionKind::kCopyToHost, {"out", i.src}},
          {InstructionKind::kFree, {"free", i.src}},
          {InstructionKind::kAllocate, {"take", i.dst}},
          {InstructionKind::kCopyToDevice, {"back", i.dst}}};
      const auto found = of.find(i.kind);
      if (found == of.end() || plan.buffers[found->second.second].role != BufferRole::kActivation) continue;
      const auto last = [](const std::string& fqn) { return fqn.empty() ? "root" : fqn.substr(7, 1); };
      moves.push_back(std::string(found->second.first) + " " +
                      last(plan.units[plan.buffers[found->second.second].unit].fqn) + " at " +
                      std::string(Name(trigger.kind)) + " " + last(plan.units[trigger.unit].fqn));
    }
  }
  return moves;
}

std::int64_t DevicePeak(const Plan& plan) { return ProfileMemory(plan).peak_bytes.value; }

TEST(ActivationOffloadTest, EveryBlockGoesWhileTheNextOneRuns) {
  const Plan plan = OffloadingPlan(OffloadedBlocks(), Offloading({"blocks.*"}));
  EXPECT_EQ(ActivationMoves(plan),
            (std::vector<std::string>{
                "out 0 at post_forward 0", "free 0 at post_forward 1", "out 1 at post_forward 1",
                "free 1 at post_forward 2", "out 2 at post_forward 2", "free 2 at post_forward 3",
                "out 3 at post_forward 3", "free 3 at post_forward 4", "out 4 at post_forward 4",
                "free 4 at post_forward root",
                // The last one has the distance of the one before: one unit.
                "take 4 at pre_backward root", "back 4 at pre_backward root", "take 3 at pre_backward 4",
                "back 3 at pre_backward 4", "take 2 at pre_backward 3", "back 2 at pre_backward 3",
                "take 1 at pre_backward 2", "back 1 at pre_backward 2", "take 0 at pre_backward 1",
                "back 0 at pre_backward 1"}));
}

TEST(ActivationOffloadTest, ABlockHasTheTimeOfThoseBetweenItAndTheNext) {
  const Plan plan = OffloadingPlan(OffloadedBlocks(), Offloading({"blocks.*"}, 2));
  EXPECT_EQ(ActivationMoves(plan),
            (std::vector<std::string>{
                "out 0 at post_forward 0", "free 0 at post_forward 2", "out 2 at post_forward 2",
                "free 2 at post_forward 4", "out 4 at post_forward 4", "free 4 at post_forward root",
                "take 4 at pre_backward root", "back 4 at pre_backward root", "take 2 at pre_backward 4",
                "back 2 at pre_backward 4", "take 0 at pre_backward 2", "back 0 at pre_backward 2"}));
}

TEST(ActivationOffloadTest, WhatAutogradAloneHoldsGoes) {
  const Trace trace = OffloadedBlocks();
  const Plan plan = OffloadingPlan(trace, Offloading({"blocks.1"}));
  std::vector<StorageId> expected;  // born in block 1 but for its output, which is the last
  for (const TraceEvent& event : trace.forwards[0].events) {
    const auto* born = std::get_if<AllocateEvent>(&event);
    if (born == nullptr || born->role != StorageRole::kSaved) continue;
    if (trace.modules[born->module].fqn.starts_with("blocks.1.")) expected.push_back(born->storage);
  }
  ASSERT_EQ(expected.size(), 3U);
  expected.pop_back();
  int device = 0, host = 0;
  for (const Buffer& buffer : plan.buffers) {
    if (!buffer.storages.empty()) {
      EXPECT_EQ(buffer.storages, expected) << buffer.name;
      EXPECT_EQ(buffer.parts_bytes, (std::vector<Bytes>{{4096}, {4096}})) << buffer.name;
    }
    device += buffer.role == BufferRole::kActivation;
    host += buffer.role == BufferRole::kActivationHost;
  }
  EXPECT_EQ(device, 1);
  EXPECT_EQ(host, 1);
}

TEST(ActivationOffloadTest, FreesDeviceMemoryAndTakesHostMemory) {
  const Trace trace = OffloadedBlocks();
  const Plan plain = OffloadingPlan(trace, [] {
    Strategy strategy = Offloading({"blocks.*"});
    strategy.activation_offload.reset();
    return strategy;
  }());
  const Plan offloading = OffloadingPlan(trace, Offloading({"blocks.*"}));
  // Two of five blocks are there at a time: one that runs, and one on its way.
  EXPECT_EQ(DevicePeak(offloading), DevicePeak(plain) - (kOffloadBlocks - 2) * 2 * 4096);
  EXPECT_EQ(ProfileMemory(offloading, {.space = MemorySpace::kHost}).peak_bytes.value,
            kOffloadBlocks * 2 * 4096);
}

TEST(ActivationOffloadTest, ModulesOfAUnitAlone) {
  const Plan plan = OffloadingPlan(OffloadedBlocks(), Offloading({"blocks.*.x"}));
  for (const Buffer& buffer : plan.buffers) {
    EXPECT_TRUE(buffer.storages.empty()) << "x's only tensor is its output";
  }
}

TEST(ActivationOffloadTest, RefusesWhatCannotBe) {
  const Trace trace = OffloadedBlocks();
  EXPECT_NE(OffloadError(trace, Offloading({"embed"})).find("in no unit but the root"), std::string::npos);
  EXPECT_NE(OffloadError(trace, Offloading({"nothing"})).find("/activation_offload/modules/0"),
            std::string::npos);
  EXPECT_NE(OffloadError(trace, Offloading({})).find("activations of no module"), std::string::npos);
  Strategy both = Offloading({"blocks.*"});
  both.checkpoint = CheckpointRule{.modules = {"blocks.3"}};
  EXPECT_NE(OffloadError(trace, both).find("offloaded and recomputed, too"), std::string::npos);
  Strategy pipeline = Offloading({"blocks.*"});
  pipeline.program = {{ForwardCall{0, 0}, ForwardCall{1, 0}, BackwardCall{{0}, 0}, BackwardCall{{1}, 0},
                       OptimizerStepCall{}, ZeroGradCall{}}};
  EXPECT_NE(OffloadError(trace, pipeline).find("one micro-batch at a time"), std::string::npos);
  Strategy lost = Offloading({"blocks.*"});
  lost.program = {
      {ForwardCall{0, 0}, ForwardCall{1, 0}, BackwardCall{{1}, 0}, OptimizerStepCall{}, ZeroGradCall{}}};
  EXPECT_NE(OffloadError(trace, lost), "");
}

TEST(ActivationOffloadTest, PlainFsdp2LeavesItOut) {
  Strategy strategy = Offloading({"blocks.*"});
  strategy.policy = "fsdp2";
  const Fsdp2Settings settings = WithoutWhatFsdp2Lacks(strategy);
  ASSERT_EQ(settings.left_out.size(), 1U);
  EXPECT_EQ(settings.left_out.front().pointer, "/strategy/activation_offload");
  EXPECT_FALSE(settings.strategy.activation_offload);
}

TEST(ActivationOffloadTest, AllowingItMakesNoStepLonger) {
  const auto [first, last] = testing::SeedsUpTo(4);
  int compared = 0, faster = 0, offloading = 0;
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    testing::PartsCase c = testing::RandomPartsCase(seed, 6);
    c.cluster.host_link_bytes_per_second = 100'000'000'000;
    Strategy strategy;
    if (seed % 3 == 0) strategy.program = {testing::MicrobatchStep(2)};
    const Result<OptimizeOutput> loose = Optimize(c.trace, strategy, c.cluster, {.budget = testing::kLoose});
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    for (const std::int64_t percent : {60, 45}) {
      OptimizeOptions options{.budget = Bytes{loose->report.peak_reserved_bytes.value * percent / 100},
                              .may_checkpoint = true,
                              .plan_limit = 300};
      const Result<OptimizeOutput> without = Optimize(c.trace, strategy, c.cluster, options);
      options.may_offload_activations = true;
      const Result<OptimizeOutput> with = Optimize(c.trace, strategy, c.cluster, options);
      ASSERT_TRUE(with.has_value() || !without.has_value()) << ToString(with.error());
      if (!with) continue;
      EXPECT_LE(with->report.peak_reserved_bytes, *options.budget);
      ASSERT_TRUE(with->certificate.has_value());
      const Status holds = CheckCertificate(c.trace, with->plan, *with->certificate);
      EXPECT_TRUE(holds.has_value()) << ToString(holds.error());
      offloading += OffloadsActivations(with->plan);
      Certificate narrow = *with->certificate;
      narrow.activation_offload = false;
      if (OffloadsActivations(with->plan)) {
        EXPECT_FALSE(CheckCertificate(c.trace, with->plan, narrow).has_value());
      }
      if (!without) continue;
      ++compared;
      EXPECT_LE(with->report.step_ns, without->report.step_ns) << percent << " %";
      faster += with->report.step_ns < without->report.step_ns;
    }
  }
  if (first == last) return;
  EXPECT_GT(compared, 2);
  EXPECT_GT(offloading, 0);
  EXPECT_GT(faster, 0);
}

// Each wait, and each instruction that moves activations, is needed: the verifier sees it go.
TEST(ActivationOffloadTest, TheVerifierMissesEveryWaitThatIsLeftOut) {
  const Plan plan = OffloadingPlan(OffloadedBlocks(/*with_head=*/true), Offloading({"blocks.*"}, 2));
  int left_out = 0;
  const auto steady = static_cast<std::size_t>(plan.steady_step);
  for (std::size_t t = 0; t < plan.steps[steady].triggers.size(); ++t) {
    const std::vector<Instruction>& list = plan.steps[steady].triggers[t].instructions;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].reason != "offload_activations") continue;
      Plan changed = plan;
      std::vector<Instruction>& edited = changed.steps[steady].triggers[t].instructions.Edit();
      edited.erase(edited.begin() + static_cast<std::ptrdiff_t>(i));
      ++left_out;
      EXPECT_FALSE(Verify(changed).empty())
          << Name(list[i].kind) << " of " << (list[i].event >= 0 ? plan.events[list[i].event] : "")
          << " at trigger " << t;
    }
  }
  EXPECT_EQ(left_out, 3 * 12);
}

}  // namespace
}  // namespace shardplan
