// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing as a transformation of a trace.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::TraceOf;
using testing::TreeModule;

constexpr int kBlocks = 4;

// Blocks of three operators each: what the first two save is needed in the block's backward, what the last
// one writes is the next block's input.
Trace Blocks() {
  TreeModule list{.name = "blocks", .class_name = "ModuleList"};
  for (int i = 0; i < kBlocks; ++i) {
    TreeModule block{.name = std::to_string(i)};
    for (const char* name : {"x", "y", "z"}) block.children.push_back({.name = name, .parameters = {{4, 4}}});
    list.children.push_back(std::move(block));
  }
  return TraceOf({.children = {{.name = "embed", .parameters = {{4, 4}}}, list}});
}

struct Memory {
  std::int64_t peak = 0, at_forward_end = 0, left = 0;
};

// Replays allocations and frees; fails on a use of something that is not alive.
Memory Replay(const Trace& trace) {
  std::map<StorageId, std::int64_t> alive;
  std::int64_t total = 0;
  Memory memory;
  const std::set<StorageId> inputs = {trace.inputs[0].storage};
  for (const Pass* pass : {&trace.forwards[0], &trace.backwards[0]}) {
    for (const TraceEvent& event : pass->events) {
      if (const auto* allocate = std::get_if<AllocateEvent>(&event)) {
        EXPECT_TRUE(alive.emplace(allocate->storage, allocate->size_bytes.value).second) << allocate->storage;
        if (allocate->role != StorageRole::kParameterGrad) total += allocate->size_bytes.value;
      } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
        EXPECT_TRUE(alive.contains(free->storage)) << "freed twice: " << free->storage;
        total -= alive[free->storage];
        alive.erase(free->storage);
      } else if (const auto* op = std::get_if<OperatorEvent>(&event)) {
        for (const StorageId s : op->reads) EXPECT_TRUE(alive.contains(s) || inputs.contains(s)) << s;
        for (const StorageId s : op->writes) EXPECT_TRUE(alive.contains(s)) << s;
      }
      memory.peak = std::max(memory.peak, total);
    }
    if (pass == &trace.forwards[0]) memory.at_forward_end = total;
  }
  memory.left = total;
  return memory;
}

std::int64_t Flops(const Pass& pass) {
  std::int64_t flops = 0;
  for (const TraceEvent& event : pass.events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) flops += op->flops;
  }
  return flops;
}

TEST(CheckpointingTest, ForwardKeepsOneInputPerBlockAndBackwardRunsItAgain) {
  const Trace plain = Blocks();
  const Result<Trace> checkpointed =
      ApplyCheckpointing(plain, {.modules = {"blocks.*"}, .early_stop = false});
  ASSERT_TRUE(checkpointed);
  const Memory before = Replay(plain);
  const Memory after = Replay(*checkpointed);
  constexpr std::int64_t kActivation = 4096;
  EXPECT_EQ(before.at_forward_end, (1 + 3 * kBlocks) * kActivation);
  // Every block's input: the outputs of the embedding and of all blocks but the last.
  EXPECT_EQ(after.at_forward_end, kBlocks * kActivation);
  EXPECT_LT(after.peak, before.peak);
  EXPECT_EQ(after.left, before.left);
  EXPECT_EQ(Flops(checkpointed->forwards[0]), Flops(plain.forwards[0]));
  // All three operators of every block run again.
  EXPECT_EQ(Flops(checkpointed->backwards[0]) - Flops(plain.backwards[0]), 3 * kBlocks * 1'000'000);
}

// Python lets go of a block's tensors where the block returns.
Trace WithReleases(Trace trace, StorageId except) {
  std::vector<TraceEvent> events;
  std::vector<StorageId> born;
  int depth = 0;
  for (const TraceEvent& event : trace.forwards[0].events) {
    const auto* enter = std::get_if<EnterEvent>(&event);
    const auto* exit = std::get_if<ExitEvent>(&event);
    const auto* allocate = std::get_if<AllocateEvent>(&event);
    const auto is_block = [&](ModuleId module) {
      return trace.modules[module].class_name != "ModuleList" && trace.modules[module].children.size() == 3;
    };
    if (enter != nullptr && is_block(enter->module)) depth = 1;
    if (allocate != nullptr && depth == 1 && allocate->role == StorageRole::kSaved)
      born.push_back(allocate->storage);
    events.push_back(event);
    if (exit == nullptr || !is_block(exit->module)) continue;
    depth = 0;
    for (const StorageId storage : born) {
      if (storage != except) events.emplace_back(ReleaseEvent{storage});
    }
    born.clear();
  }
  trace.forwards[0].events = std::move(events);
  return trace;
}

TEST(CheckpointingTest, AForwardFreesWherePythonReleases) {
  const Trace plain = Blocks();
  const Trace marked = WithReleases(plain, -1);
  const std::set<StorageId> released = [&] {
    std::set<StorageId> storages;
    for (const TraceEvent& event : marked.forwards[0].events) {
      if (const auto* release = std::get_if<ReleaseEvent>(&event)) storages.insert(release->storage);
    }
    return storages;
  }();
  ASSERT_GE(released.size(), 2U * kBlocks);
  const Result<Trace> checkpointed = ApplyCheckpointing(marked, {.modules = {"blocks.*"}});
  ASSERT_TRUE(checkpointed);
  EXPECT_EQ(Replay(*checkpointed).left, 0);
  // The forward is that of the trace with some of the releases, in place, as deaths: those of what is no
  // block's input.
  std::vector<TraceEvent> expected = marked.forwards[0].events;
  std::size_t deaths = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto* release = std::get_if<ReleaseEvent>(&expected[i]);
    const auto* allocate = std::get_if<AllocateEvent>(&expected[i]);
    const TraceEvent& found = checkpointed->forwards[0].events.at(i);
    if (release != nullptr) {
      const auto* dead = std::get_if<FreeEvent>(&found);
      deaths += dead != nullptr ? 1 : 0;
      EXPECT_TRUE(dead == nullptr ? found == expected[i] : dead->storage == release->storage) << i;
    } else if (allocate == nullptr) {
      EXPECT_EQ(found, expected[i]) << i;
    }
  }
  EXPECT_EQ(checkpointed->forwards[0].events.size(), expected.size());
  EXPECT_EQ(deaths, 2U * kBlocks + 1);  // and the last block's output

  // A tensor that the model keeps a name for does not die in the forward.
  const StorageId kept = *released.begin();
  const Result<Trace> with_name = ApplyCheckpointing(WithReleases(plain, kept), {.modules = {"blocks.*"}});
  ASSERT_TRUE(with_name);
  EXPECT_EQ(Replay(*with_name).left, 0);
  for (const TraceEvent& event : with_name->forwards[0].events) {
    const auto* dead = std::get_if<FreeEvent>(&event);
    EXPECT_FALSE(dead != nullptr && dead->storage == kept);
  }
}

TEST(CheckpointingTest, EarlyStopEndsWithTheLastSavedTensor) {
  Trace plain = Blocks();
  // z's backward does not need its own output: nothing after y has to be remade.
  for (TraceEvent& event : plain.backwards[0].events) {
    auto* op = std::get_if<OperatorEvent>(&event);
    if (op != nullptr && plain.modules[op->module].fqn.ends_with(".z")) op->reads = {op->reads[0] - 1};
  }
  const Result<Trace> stopped = ApplyCheckpointing(plain, {.modules = {"blocks.*"}});
  const Result<Trace> whole = ApplyCheckpointing(plain, {.modules = {"blocks.*"}, .early_stop = false});
  ASSERT_TRUE(stopped && whole);
  EXPECT_EQ(Flops(stopped->backwards[0]) - Flops(plain.backwards[0]), 2 * kBlocks * 1'000'000);
  EXPECT_EQ(Flops(whole->backwards[0]) - Flops(plain.backwards[0]), 3 * kBlocks * 1'000'000);
  EXPECT_EQ(Replay(*stopped).left, 0);
}

// A matrix product with a frozen weight saves nothing but that: what comes before it runs again for it.
TEST(CheckpointingTest, EarlyStopIsBehindWhatLeadsToTheLastSavedParameter) {
  Trace plain = Blocks();
  for (TraceEvent& event : plain.backwards[0].events) {
    auto* op = std::get_if<OperatorEvent>(&event);
    if (op == nullptr) continue;
    const std::string& fqn = plain.modules[op->module].fqn;
    if (fqn.ends_with(".y")) op->reads = {op->reads[0] - 1};
    if (fqn.ends_with(".z")) op->reads.clear();
  }
  const Result<Trace> stopped = ApplyCheckpointing(plain, {.modules = {"blocks.*"}});
  ASSERT_TRUE(stopped);
  EXPECT_EQ(Flops(stopped->backwards[0]) - Flops(plain.backwards[0]), 2 * kBlocks * 1'000'000);
  EXPECT_EQ(Replay(*stopped).left, 0);
  int again = 0, products = 0;
  for (const TraceEvent& event : stopped->backwards[0].events) {
    if (std::holds_alternative<RecomputeEnterEvent>(event)) ++again;
    const auto* op = std::get_if<OperatorEvent>(&event);
    if (op == nullptr || op->flops != 2'000'000 || !plain.modules[op->module].fqn.ends_with(".z")) continue;
    ++products;
    EXPECT_EQ(again, 4 * products) << "the block and its three modules are entered again before its backward";
  }
  EXPECT_EQ(products, kBlocks);
}

// The last node that saved something may end with operators that read none of it (the square of a norm): the
// block's input is there until the node gives up what it saved.
TEST(CheckpointingTest, InputsStayUntilTheLastNodeIsThrough) {
  Trace plain = Blocks();
  std::vector<TraceEvent> backward;
  std::set<StorageId> moved;  // outputs of blocks that nothing saves
  for (const TraceEvent& event : plain.backwards[0].events) {
    const auto* free = std::get_if<FreeEvent>(&event);
    if (free != nullptr && moved.contains(free->storage)) continue;
    backward.push_back(event);
    auto* op = std::get_if<OperatorEvent>(&backward.back());
    if (op == nullptr) continue;
    const std::string& fqn = plain.modules[op->module].fqn;
    if (fqn.ends_with(".z") && fqn != "blocks.3.z") moved.insert(op->reads[0]);
    if (fqn.ends_with(".z")) op->reads = {op->reads[0] - 1};
    if (!fqn.ends_with(".x")) continue;
    OperatorEvent rest{.name = "aten.mul", .module = op->module, .reads = {op->writes[0]}};
    backward.push_back(std::move(rest));
  }
  plain.backwards[0].events = std::move(backward);
  for (const StorageId storage : moved) plain.forwards[0].events.push_back(FreeEvent{storage});
  ASSERT_EQ(moved.size(), static_cast<std::size_t>(kBlocks - 1));
  EXPECT_EQ(Replay(plain).left, 0);

  const Result<Trace> checkpointed = ApplyCheckpointing(plain, {.modules = {"blocks.*"}});
  ASSERT_TRUE(checkpointed);
  EXPECT_EQ(Replay(*checkpointed).left, 0);
  std::set<StorageId> freed;
  std::size_t through = 0;
  for (const TraceEvent& event : checkpointed->backwards[0].events) {
    const auto* op = std::get_if<OperatorEvent>(&event);
    if (const auto* free = std::get_if<FreeEvent>(&event); free != nullptr && moved.contains(free->storage)) {
      freed.insert(free->storage);
      EXPECT_EQ(freed.size(), through) << "storage " << free->storage;
    }
    if (op != nullptr && op->name == "aten.mul") {
      EXPECT_EQ(freed.size(), through);
      ++through;
    }
  }
  EXPECT_EQ(freed, moved);
}

// validate_outputs sums the gradient of an operand that was broadcast when the node that made it is gone.
TEST(CheckpointingTest, WhatANodeUnpacksDiesBeforeTheEnginesSums) {
  Trace plain = Blocks();
  StorageId next = 1'000;
  std::vector<TraceEvent> backward;
  OperatorEvent node;
  for (const TraceEvent& event : plain.backwards[0].events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) node = *op;
    const bool frees = std::holds_alternative<FreeEvent>(event);
    for (int i = 0; i < 2 && frees && plain.modules[node.module].fqn.ends_with(".y"); ++i) {
      backward.emplace_back(AllocateEvent{next, Bytes{64}, StorageRole::kBackwardTemp, node.module});
      backward.emplace_back(
          OperatorEvent{.name = "aten.sum", .module = node.module, .reads = node.writes, .writes = {next}});
      backward.emplace_back(FreeEvent{next++});
    }
    backward.push_back(event);
  }
  plain.backwards[0].events = std::move(backward);
  const Result<Trace> checkpointed = ApplyCheckpointing(plain, {.modules = {"blocks.*"}});
  ASSERT_TRUE(checkpointed);
  EXPECT_EQ(Replay(*checkpointed).left, Replay(plain).left);
  std::set<StorageId> remade;
  int freed_before = 0, sums = 0;
  for (const TraceEvent& event : checkpointed->backwards[0].events) {
    const auto* allocate = std::get_if<AllocateEvent>(&event);
    const auto* free = std::get_if<FreeEvent>(&event);
    const auto* op = std::get_if<OperatorEvent>(&event);
    if (allocate != nullptr && allocate->role == StorageRole::kRecompute) remade.insert(allocate->storage);
    if (free != nullptr && remade.contains(free->storage)) ++freed_before;
    if (op == nullptr) continue;
    if (op->name == "aten.sum" && ++sums % 2 == 1) {
      EXPECT_EQ(freed_before, 1);
    } else {
      EXPECT_TRUE(op->name != "aten.sum" || freed_before == 0);
    }
    freed_before = 0;
  }
  EXPECT_EQ(sums, 2 * kBlocks);
}

TEST(CheckpointingTest, PlansOfBothPoliciesVerify) {
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    for (const char* modules : {"blocks.*", "blocks.*.y", ""}) {
      const Strategy strategy{.policy = policy, .checkpoint = CheckpointRule{.modules = {modules}}};
      const Result<PlannerOutput> planned = MakePlan(Blocks(), strategy, ClusterOf(2));
      EXPECT_TRUE(planned) << policy << " " << modules << " " << ToString(planned.error());
    }
  }
}

TEST(CheckpointingTest, UnitsInsideACheckpointedModuleRunTheirForwardHooksAgain) {
  Strategy strategy{.units = {{.modules = {"blocks.*.x"}}, {.modules = {""}}},
                    .checkpoint = CheckpointRule{.modules = {"blocks.*"}}};
  const Result<PlannerOutput> planned = MakePlan(Blocks(), strategy, ClusterOf(2));
  ASSERT_TRUE(planned) << ToString(planned.error());
  // Each unit x: once in the forward, once in the recomputation that its block's backward starts with.
  std::map<std::string, std::vector<TriggerKind>> hooks;
  for (const Trigger& trigger : planned->plan.steps[planned->plan.steady_step].triggers) {
    if (trigger.unit > 0) hooks[planned->plan.units[trigger.unit].fqn].push_back(trigger.kind);
  }
  EXPECT_EQ(hooks.size(), static_cast<std::size_t>(kBlocks));
  using enum TriggerKind;
  for (const auto& [unit, kinds] : hooks) {
    EXPECT_EQ(kinds, (std::vector{kPreForward, kPostForward, kPreForward, kPostForward, kPreBackward,
                                  kPostBackward}))
        << unit;
  }
}

int RecomputedBlocks(const Trace& trace) {
  int blocks = 0;
  for (const TraceEvent& event : trace.backwards[0].events) {
    const auto* enter = std::get_if<RecomputeEnterEvent>(&event);
    if (enter == nullptr) continue;
    const std::string& fqn = trace.modules[enter->module].fqn;  // "blocks.1", not "blocks.1.x"
    blocks += fqn.starts_with("blocks.") && fqn.find('.', 7) == std::string::npos ? 1 : 0;
  }
  return blocks;
}

// torchtitan counts from one: of four blocks every second is the second and the fourth.
TEST(SelectiveCheckpointing, EveryKthModule) {
  const Trace plain = Blocks();
  for (const std::int64_t every : {1, 2, 3, 4, 5}) {
    const Result<Trace> made =
        ApplyCheckpointing(plain, {.modules = {"blocks.*"}, .early_stop = false, .every = every});
    ASSERT_TRUE(made);
    EXPECT_EQ(RecomputedBlocks(*made), kBlocks / every);
    EXPECT_EQ(Flops(made->backwards[0]) - Flops(plain.backwards[0]), kBlocks / every * 3 * 1'000'000);
    EXPECT_EQ(Replay(*made).left, 0);
  }
  const Result<Trace> second = ApplyCheckpointing(plain, {.modules = {"blocks.*"}, .every = 2});
  ASSERT_TRUE(second);
  for (const TraceEvent& event : second->backwards[0].events) {
    const auto* enter = std::get_if<RecomputeEnterEvent>(&event);
    if (enter == nullptr) continue;
    const std::string& fqn = plain.modules[enter->module].fqn;
    EXPECT_TRUE(fqn.starts_with("blocks.1") || fqn.starts_with("blocks.3")) << fqn;
  }
}

// Every product kept: nothing runs again, and the forward keeps what it kept without checkpointing. Every
// second one run again: of x, y and z that is y.
TEST(SelectiveCheckpointing, WhatIsSavedIsNotRunAgain) {
  const Trace plain = Blocks();
  const Memory before = Replay(plain);
  const auto with = [&](std::int64_t again) {
    const Result<Trace> made = ApplyCheckpointing(
        plain, {.modules = {"blocks.*"}, .early_stop = false, .save = {{"aten.mm", again}}});
    EXPECT_TRUE(made);
    EXPECT_EQ(Replay(*made).left, 0);
    return *made;
  };
  constexpr std::int64_t kActivation = 4096;
  const Trace all = with(0);
  EXPECT_EQ(Flops(all.backwards[0]), Flops(plain.backwards[0]));
  EXPECT_EQ(Replay(all).at_forward_end, before.at_forward_end);
  EXPECT_EQ(RecomputedBlocks(all), kBlocks);
  const Trace second = with(2);
  EXPECT_EQ(Flops(second.backwards[0]) - Flops(plain.backwards[0]), kBlocks * 1'000'000);
  EXPECT_EQ(Replay(second).at_forward_end, before.at_forward_end - kBlocks * kActivation);
}

TEST(SelectiveCheckpointing, OperatorsThatTheModelLacksAreRefused) {
  const Result<Trace> made =
      ApplyCheckpointing(Blocks(), {.modules = {"blocks.*"}, .save = {{"aten.bmm", 0}}});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().pointer, "/checkpoint/save");
}

// Any rule: nothing is used that is not there, nothing is left, what runs again is the rest of the forward,
// and the plans verify.
TEST(SelectiveCheckpointing, AnyRuleKeepsMemoryInOrder) {
  std::uint32_t state = 20'260'000;
  const auto below = [&state](std::uint32_t n) {
    state = state * 1'664'525 + 1'013'904'223;
    return (state >> 10) % n;
  };
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE("round " + std::to_string(round) + " of seed 20260000");
    Trace plain = Blocks();
    const std::vector<std::string> names = {"aten.mm", "aten.mul", "aten.silu"};
    for (TraceEvent& event : plain.forwards[0].events) {
      if (auto* op = std::get_if<OperatorEvent>(&event)) op->name = names[below(3)];
    }
    CheckpointRule rule{.modules = {below(2) == 0 ? "blocks.*" : "blocks"}, .early_stop = below(2) == 0};
    if (rule.modules[0] == "blocks.*") rule.every = 1 + below(3);
    for (const std::string& name : names) {
      if (below(2) == 0) rule.save.push_back({name, below(4)});
    }
    const Result<Trace> made = ApplyCheckpointing(plain, rule);
    if (!made) {
      ASSERT_EQ(made.error().pointer, "/checkpoint/save");
      continue;
    }
    EXPECT_EQ(Replay(*made).left, 0);
    CheckpointRule all = rule;
    all.save.clear();
    const Result<Trace> whole = ApplyCheckpointing(plain, all);
    ASSERT_TRUE(whole);
    EXPECT_LE(Flops(made->backwards[0]), Flops(whole->backwards[0]));
    EXPECT_GE(Flops(made->backwards[0]), Flops(plain.backwards[0]));
    EXPECT_GE(Replay(*made).at_forward_end, Replay(*whole).at_forward_end);
    const Strategy strategy{.policy = below(2) == 0 ? "fsdp1" : "fsdp2", .checkpoint = rule};
    const Result<PlannerOutput> planned = MakePlan(plain, strategy, ClusterOf(2));
    EXPECT_TRUE(planned) << ToString(planned.error());
  }
}

}  // namespace
}  // namespace shardplan
