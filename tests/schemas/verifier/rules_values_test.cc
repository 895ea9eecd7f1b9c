// SPDX-License-Identifier: Apache-2.0
// Rules on values: layout, wrong_value, compute_order, optimizer_step. Each: a good plan with one mistake,
// and what is reported. Consequences of a mistake are listed, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/schemas/verifier/rules.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;
using Only = std::set<std::string>;

// ---- layout ----

// The rules broken after a change of one buffer.
Only After(Plan plan, const std::string& buffer, const std::function<void(Buffer&)>& change) {
  change(plan.buffers[BufferNamed(plan, buffer)]);
  return RulesOf(plan);
}

TEST_F(Rules, LayoutOfEveryBufferIsExact) {
  const Plan good =
      Fsdp2LikePlan({.units = 2, .parameters = 2, .mixed_precision = true, .bf16_reduce = true});
  ASSERT_THAT(Verify(good), IsEmpty());
  int tried = 0;
  for (const Buffer& buffer : good.buffers) {
    if (buffer.role == BufferRole::kOptimizerState) continue;
    for (std::size_t part = 0; part < buffer.parts_bytes.size(); ++part) {
      for (const int bytes : {-2, 2}) {
        EXPECT_THAT(After(good, buffer.name, [&](Buffer& b) { b.parts_bytes[part].value += bytes; }),
                    Contains("layout"))
            << buffer.name << ", part " << part;
        ++tried;
      }
    }
    for (const DType dtype : {DType::kFloat16, DType::kFloat64, DType::kInt32}) {
      EXPECT_THAT(After(good, buffer.name, [&](Buffer& b) { b.dtype = dtype; }), Contains("layout"))
          << buffer.name << " in " << Name(dtype);
    }
  }
  EXPECT_GT(tried, 40);
}

TEST_F(Rules, LayoutOfMemoryOfTheHost) {
  EXPECT_EQ(After(good_, "layers.0.all_gather_output", [](Buffer& b) { b.memory = MemoryKind::kPinnedHost; }),
            Only{"layout"});
  Plan plan = Fsdp1LikePlan({.offload = true});
  ASSERT_THAT(Verify(plan), IsEmpty());
  EXPECT_THAT(After(plan, "layers.0.grad_host", [](Buffer& b) { b.memory = MemoryKind::kDevice; }),
              Contains("layout"));
  // The host steps what is in its memory.
  EXPECT_THAT(After(plan, "layers.0.param_sharded", [](Buffer& b) { b.memory = MemoryKind::kDevice; }),
              Contains("layout"));
}

// An all-gather right into the parameters: right for one that is cut along its rows, garbage for two.
TEST_F(Rules, LayoutOfAGatherIntoParameters) {
  for (const int parameters : {1, 2}) {
    Plan plan = Fsdp2LikePlan({.units = 1, .parameters = parameters});
    ASSERT_THAT(Verify(plan), IsEmpty());
    const BufferId shard = BufferNamed(plan, "layers.0.param_sharded");
    const BufferId whole = BufferNamed(plan, "layers.0.param_unsharded");
    for (const Spot spot : SpotsOf(plan, kAllGather)) {
      Instruction& gather = test::InstructionAt(plan, spot);
      gather.src = shard;
      gather.dst = whole;
    }
    const std::vector<Violation> violations = Verify(plan);
    EXPECT_EQ(RulesOf(violations).contains("layout"), parameters == 2) << parameters;
  }
}

TEST_F(Rules, LayoutOfOneParameterThatIsCutElsewhere) {
  Plan plan = Fsdp2LikePlan({.units = 1, .reduce_into_grad = true});
  ASSERT_THAT(Verify(plan), IsEmpty());
  const auto reduce_grad = [](Plan p) {
    for (const Spot spot : SpotsOf(p, kReduceScatter)) {
      test::InstructionAt(p, spot).src = BufferNamed(p, "layers.0.grad_unsharded");
    }
    return RulesOf(p);
  };
  EXPECT_FALSE(reduce_grad(plan).contains("layout"));
  plan.units[0].parameters[0].shape = {2, 4};
  EXPECT_FALSE(reduce_grad(plan).contains("layout"));
  plan.units[0].parameters[0].shard_dim = 1;
  EXPECT_TRUE(reduce_grad(plan).contains("layout"));
}

TEST_F(Rules, LayoutOfACopyThatMovesNothing) {
  Plan plan = good_;
  plan.units[0].parameters.push_back(plan.units[0].parameters[0]);
  EXPECT_THAT(After(plan, "layers.0.param_unsharded", [](Buffer& b) { b.parameters = {1}; }),
              Contains("layout"));
}

// ---- wrong_value ----

TEST_F(Rules, WrongValueOfAGatherOverOtherRanks) {
  // Shards of four ranks, and a smaller mesh of two after the forward.
  const auto over = [](Plan plan, CommunicatorId communicator) {
    for (const Spot spot : SpotsOf(plan, kAllGather)) {
      test::InstructionAt(plan, spot).communicator = communicator;
    }
    return RulesOf(plan);
  };
  Plan plan = Fsdp2LikePlan({.units = 1, .shards = 4});
  ASSERT_THAT(Verify(plan), IsEmpty());
  plan.communicators.push_back({.name = "post_forward", .size = 2});
  plan.communicators.push_back({.name = "same", .size = 4});
  for (Unit& unit : plan.units) unit.post_forward_communicator = 1;
  EXPECT_EQ(over(plan, 1), Only{"wrong_value"});
  EXPECT_THAT(over(plan, 2), IsEmpty());
}

// Without the instructions of the steady step that the predicate names; `kept` has a value at its beginning.
Plan WithoutInSteady(Plan plan, const std::set<BufferId>& kept,
                     const std::function<bool(const Instruction&)>& leaves_out) {
  for (const BufferId buffer : kept) plan.buffers[buffer].persistent = true;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
        const bool lives = i.kind == kAllocate || i.kind == kFree;
        return (lives && (kept.contains(i.dst) || kept.contains(i.src))) ||
               (step.name == "steady" && leaves_out(i));
      });
    }
  }
  return plan;
}

// The output of the last step's all-gather is still there, and nothing gathers in this step's forward.
TEST_F(Rules, WrongValueOfTheLastStepsGather) {
  for (const int parameters : {1, 2}) {
    const Plan plan = Fsdp2LikePlan({.units = 1, .parameters = parameters});
    const BufferId output = BufferNamed(plan, "layers.0.all_gather_output");
    const auto rules = [&](const std::set<InstructionKind>& kinds) {
      return RulesOf(WithoutInSteady(plan, {output}, [&](const Instruction& i) {
        return (i.src == output || i.dst == output) && kinds.contains(i.kind);
      }));
    };
    EXPECT_EQ(rules({}), Only{});  // all of it, each time
    EXPECT_EQ(rules({kAllGather, kCopyIn}), Only{"wrong_value"});
  }
  // In the forward alone: the backward gathers again.
  Plan plan = Fsdp2LikePlan({.units = 1, .prefetch = false});
  const BufferId output = BufferNamed(plan, "layers.0.all_gather_output");
  plan = WithoutInSteady(plan, {output}, [](const Instruction&) { return false; });
  for (Trigger& trigger : plan.steps[1].triggers) {
    if (trigger.kind != TriggerKind::kPreForward) continue;
    std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
      return i.dst == output && (i.kind == kAllGather || i.kind == kCopyIn);
    });
  }
  const std::vector<Violation> violations = Verify(plan);
  ASSERT_EQ(RulesOf(violations), Only{"wrong_value"});
  EXPECT_THAT(violations[0].message, HasSubstr("older than the optimizer's step"));
}

// The backward gathers the pieces that an earlier step's forward has left.
TEST_F(Rules, WrongValueOfThePostForwardShardOfAnEarlierStep) {
  const Plan plan =
      Fsdp2LikePlan({.units = 1, .parameters = 2, .reshard_to_shards = true, .prefetch = false});
  ASSERT_THAT(Verify(plan), IsEmpty());
  const std::set<BufferId> shards = {BufferNamed(plan, "layers.0.param_post_forward_shard.p0"),
                                     BufferNamed(plan, "layers.0.param_post_forward_shard.p1")};
  EXPECT_EQ(RulesOf(WithoutInSteady(plan, shards, [](const Instruction&) { return false; })), Only{});
  EXPECT_EQ(RulesOf(WithoutInSteady(plan, shards,
                                    [](const Instruction& i) { return i.kind == kReshardPostForward; })),
            Only{"wrong_value"});
  // One of them is enough.
  EXPECT_EQ(RulesOf(WithoutInSteady(plan, shards,
                                    [&](const Instruction& i) {
                                      return i.kind == kReshardPostForward && i.dst == *shards.begin();
                                    })),
            Only{"wrong_value"});
}

// A unit that no optimizer steps stays as it was: the gather of an earlier step is as good.
TEST_F(Rules, NoWrongValueOfTheLastStepsGatherOfWhatIsNotStepped) {
  Plan plan = Fsdp2LikePlan({.units = 1, .microbatches = 2});
  ASSERT_THAT(Verify(plan), IsEmpty());
  const BufferId output = BufferNamed(plan, "layers.0.all_gather_output");
  plan = WithoutInSteady(plan, {output}, [](const Instruction&) { return false; });
  for (Trigger& trigger : plan.steps[1].triggers) {
    if (trigger.kind != TriggerKind::kPreForward || trigger.microbatch != 1) continue;
    std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
      return i.dst == output && (i.kind == kAllGather || i.kind == kCopyIn);
    });
  }
  EXPECT_EQ(RulesOf(plan), Only{});
}

TEST_F(Rules, WrongValueOfSomeOfTheParameters) {
  Plan plan = Fsdp2LikePlan({.units = 1, .parameters = 2});
  Buffer& unsharded = plan.buffers[BufferNamed(plan, "layers.0.param_unsharded")];
  unsharded.parameters.pop_back();
  unsharded.parts_bytes.pop_back();
  EXPECT_EQ(RulesOf(plan), Only{"wrong_value"});
}

// ---- compute_order ----

TEST_F(Rules, ComputeOrderWithoutASegment) {
  for (const Spot spot : Steady(good_, kCompute)) {
    const Only rules = RulesOf(test::Without(good_, spot));
    EXPECT_THAT(rules, Contains("compute_order")) << test::InstructionAt(good_, spot).segment;
  }
}

TEST_F(Rules, ComputeOrderWithoutASegmentInAnyStep) {
  Plan plan = good_;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      std::erase_if(trigger.instructions.Edit(), [](const Instruction& i) { return i.segment == 0; });
    }
  }
  EXPECT_THAT(RulesOf(plan), Contains("compute_order"));
}

TEST_F(Rules, ComputeOrderOfAnotherMicroBatch) {
  Plan plan = good_;
  for (const Spot spot : SpotsOf(plan, kCompute)) test::InstructionAt(plan, spot).microbatch_offset = 1;
  EXPECT_EQ(RulesOf(plan), Only{"compute_order"});
}

TEST_F(Rules, ComputeOrderOfASegmentTwice) {
  EXPECT_THAT(RulesOf(test::Doubled(good_, Steady(good_, kCompute)[0])), Contains("compute_order"));
}

TEST_F(Rules, ComputeOrderInTheForwardOfAnotherUnit) {
  Plan plan = good_;
  for (const Spot spot : SpotsOf(plan, kCompute)) {
    Instruction& i = test::InstructionAt(plan, spot);
    if (plan.segments[i.segment].phase != SegmentPhase::kForward) continue;
    i.segment = plan.segments[i.segment].unit == 0 ? 2 : 0;
  }
  EXPECT_THAT(RulesOf(plan), Contains("compute_order"));
}

// Tensors of the model: made in the forward, read and freed in the backward.
Plan WithTensors(Plan plan) {
  for (Segment& segment : plan.segments) {
    const StorageId storage = segment.unit;
    if (segment.phase == SegmentPhase::kForward) {
      segment.entries.emplace_back(AllocateEvent{.storage = storage, .size_bytes = Bytes{8}});
    } else {
      segment.entries.emplace_back(OperatorEvent{.name = "mm", .reads = {storage}});
      segment.entries.emplace_back(FreeEvent{.storage = storage});
    }
  }
  return plan;
}

TEST_F(Rules, ComputeOrderOfTensors) {
  Plan plan = WithTensors(good_);
  ASSERT_THAT(Verify(plan), IsEmpty());
  // In every step, as a plan with one step has it: nobody makes what the backward reads.
  for (Segment& segment : plan.segments) {
    if (segment.phase == SegmentPhase::kForward && segment.unit == 0) segment.entries.clear();
  }
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), Only{"compute_order"});
  EXPECT_THAT(violations[0].message, HasSubstr("reads storage 0"));
}

// ---- optimizer_step ----

// Without the instructions that `leaves_out` says, in all steps.
Plan WithoutAll(Plan plan, const std::function<bool(const Plan&, const Instruction&)>& leaves_out) {
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) { return leaves_out(plan, i); });
    }
  }
  return plan;
}

TEST_F(Rules, OptimizerStepMissing) {
  Plan plan = good_;
  plan.strategy.optimizer.kind = OptimizerKind::kSgd;
  plan = WithoutAll(plan, [](const Plan& p, const Instruction& i) {
    return i.kind == kOptimizerStep ||
           (i.kind == kAllocate && p.buffers[i.dst].role == BufferRole::kOptimizerState);
  });
  std::erase_if(plan.buffers, [](const Buffer& b) { return b.role == BufferRole::kOptimizerState; });
  Only rules = RulesOf(plan);
  EXPECT_THAT(rules, Contains("optimizer_step"));
  // A loop of the user's that steps none.
  plan.strategy.optimizer.kind = OptimizerKind::kNone;
  EXPECT_FALSE(RulesOf(plan).contains("optimizer_step"));
}

TEST_F(Rules, OptimizerStepOfSomeUnits) {
  Plan plan = good_;
  for (const Spot spot : SpotsOf(plan, kOptimizerStep)) test::InstructionAt(plan, spot).unit = 0;
  EXPECT_EQ(RulesOf(plan), (Only{"leak", "optimizer_step"}));  // the states of the other one are of no use
}

TEST_F(Rules, OptimizerStepOfSomeParameters) {
  Plan plan = Fsdp2LikePlan({.units = 1, .parameters = 2});
  const auto step_of = [&](std::int32_t first, std::int32_t second) {
    Plan stepped = plan;
    for (PlanStep& step : stepped.steps) {
      for (Trigger& trigger : step.triggers) {
        for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
          if (trigger.instructions[i].kind != kOptimizerStep) continue;
          trigger.instructions.Edit()[i].unit = 0;
          trigger.instructions.Edit()[i].parameter = first;
          Instruction next = trigger.instructions[i];
          next.parameter = second;
          trigger.instructions.Edit().insert(
              trigger.instructions.Edit().begin() + static_cast<std::ptrdiff_t>(++i), next);
        }
      }
    }
    return RulesOf(stepped);
  };
  EXPECT_THAT(step_of(0, 1), IsEmpty());
  EXPECT_THAT(step_of(1, 0), IsEmpty());
  EXPECT_EQ(step_of(0, 0), Only{"optimizer_step"});
}

TEST_F(Rules, OptimizerStepBehindZeroGrad) {
  Plan plan = good_;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      if (trigger.kind != TriggerKind::kOptimizerStep) continue;
      trigger.instructions.Edit().insert(trigger.instructions.Edit().begin(), {.kind = kZeroGrad});
    }
  }
  EXPECT_THAT(RulesOf(plan), Contains("optimizer_step"));
}

TEST_F(Rules, OptimizerStepTwice) {
  const Spot step = Steady(good_, kOptimizerStep)[0];
  EXPECT_EQ(RulesOf(test::Doubled(good_, step)), Only{"optimizer_step"});
  Plan plan = test::Doubled(good_, step);  // where the user calls it twice, it is meant
  plan.strategy.program = {
      {ForwardCall{}, BackwardCall{}, OptimizerStepCall{}, OptimizerStepCall{}, ZeroGradCall{}}};
  EXPECT_FALSE(RulesOf(plan).contains("optimizer_step"));
}

TEST_F(Rules, OptimizerStepWithoutStates) {
  const Plan plan = WithoutAll(good_, [](const Plan& p, const Instruction& i) {
    return i.kind == kAllocate && p.buffers[i.dst].role == BufferRole::kOptimizerState &&
           p.buffers[i.dst].unit == 0;
  });
  EXPECT_EQ(RulesOf(plan), Only{"optimizer_step"});
}

TEST_F(Rules, OptimizerStepWithItsTemporaries) {
  Plan plan = good_;
  const auto temporary = static_cast<BufferId>(plan.buffers.size());
  plan.buffers.push_back(
      {.name = "optimizer.temp", .role = BufferRole::kOptimizerTemp, .parts_bytes = {Bytes{64}}});
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      if (trigger.kind != TriggerKind::kOptimizerStep) continue;
      trigger.instructions.Edit().insert(trigger.instructions.Edit().begin(),
                                         {.kind = kAllocate, .stream = 0, .dst = temporary});
      trigger.instructions.Edit().push_back({.kind = kFree, .src = temporary});
    }
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
  // Freed before the step; from the pool of a stream that still uses what was freed into it; never there.
  Plan early = plan;
  for (PlanStep& step : early.steps) {
    for (Trigger& trigger : step.triggers) {
      if (trigger.kind != TriggerKind::kOptimizerStep) continue;
      std::vector<Instruction>& list = trigger.instructions.Edit();
      std::swap(list.back(), list[list.size() - 2]);
    }
  }
  EXPECT_EQ(RulesOf(early), Only{"optimizer_step"});
  const Plan never = WithoutAll(
      plan, [&](const Plan&, const Instruction& i) { return i.dst == temporary || i.src == temporary; });
  EXPECT_EQ(RulesOf(never), Only{"optimizer_step"});
}

}  // namespace
}  // namespace shardplan::test
