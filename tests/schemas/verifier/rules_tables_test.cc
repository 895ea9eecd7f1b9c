// SPDX-License-Identifier: Apache-2.0
// Contradictions between a plan's tables: units, dtypes, what segments read, states of the optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/schemas/verifier/rules.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;
using Only = std::set<std::string>;

class Tables : public Rules {};

// ---- units ----

TEST_F(Tables, AUnitIsCutAlongADimensionThatItHas) {
  for (const std::int32_t dim : {-1, 1, 7, std::numeric_limits<std::int32_t>::max()}) {
    Plan plan = good_;
    plan.units[1].parameters[0].shard_dim = dim;
    EXPECT_EQ(RulesOf(plan), Only{"reference"}) << dim;
  }
  Plan plan = good_;
  plan.units[0].parameters[0].shape = {-8};
  EXPECT_EQ(RulesOf(plan), Only{"reference"});
  plan.units[0].parameters[0].shape = {std::numeric_limits<std::int64_t>::max(), 4};
  EXPECT_EQ(RulesOf(plan), Only{"reference"});
}

TEST_F(Tables, ParametersOfAFlatUnitHaveAPlaceOfTheirOwn) {
  const Plan good = Fsdp1LikePlan({});
  ASSERT_THAT(Verify(good), IsEmpty());
  const auto after = [&](const std::function<void(Unit&)>& change) {
    Plan plan = good;
    plan.units[0].parameters.push_back(plan.units[0].parameters[0]);
    plan.units[0].parameters[1].shape = {0};
    plan.units[0].parameters[1].flat_offset = plan.units[0].flat_numel;
    change(plan.units[0]);
    return RulesOf(plan);
  };
  EXPECT_THAT(after([](Unit&) {}), Not(Contains("reference")));
  EXPECT_EQ(after([](Unit& unit) { unit.parameters[1].flat_offset = 0; }), Only{"reference"});
  EXPECT_EQ(after([](Unit& unit) { unit.parameters[1].shape = {1}; }), Only{"reference"});
  EXPECT_EQ(after([](Unit& unit) { unit.parameters[0].flat_offset = -1; }), Only{"reference"});
  EXPECT_EQ(after([](Unit& unit) { unit.flat_numel += 1; }), Only{"reference"});
}

// ---- dtypes of a flat unit ----

// All buffers of these roles in float32, as large as they are then.
Plan Widened(Plan plan, const std::set<BufferRole>& roles) {
  for (Buffer& buffer : plan.buffers) {
    if (!roles.contains(buffer.role) || buffer.dtype != DType::kBFloat16) continue;
    buffer.dtype = DType::kFloat32;
    for (Bytes& part : buffer.parts_bytes) part.value *= 2;
  }
  return plan;
}

TEST_F(Tables, AFlatUnitComputesInItsDTypeOrEvaluatesInTheOriginal) {
  const Plan good = Fsdp1LikePlan({.mixed_precision = true});
  ASSERT_THAT(Verify(good), IsEmpty());
  Plan plan =
      Widened(good, {BufferRole::kAllGatherInput, BufferRole::kAllGatherOutput, BufferRole::kParamUnsharded});
  EXPECT_EQ(RulesOf(plan), Only{"wrong_value"});
  // In an evaluation gradients would be in that dtype, too.
  plan.strategy.policy = "fsdp1";
  plan.strategy.fsdp1.full_precision_in_eval = true;
  plan.strategy.program = {
      {ForwardCall{.training = false}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}}};
  EXPECT_THAT(RulesOf(plan), Contains("wrong_value"));
  EXPECT_THAT(RulesOf(Widened(plan, {BufferRole::kGradUnsharded})), Not(Contains("wrong_value")));
  plan.strategy.program[0][0] = ForwardCall{.training = true};
  EXPECT_THAT(RulesOf(Widened(plan, {BufferRole::kGradUnsharded})), Contains("wrong_value"));
}

// Two micro-batches of a flat unit, whose gradients are kept in `kept` in between.
Plan Accumulating(DType kept) {
  PlanBuilder b;
  const UnitId unit = b.Unit("u");
  b.MakeFlat(unit);
  b.plan().units[0].param_dtype = DType::kBFloat16;
  b.plan().strategy.mixed_precision =
      MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  const BufferId grad = b.Buffer(BufferRole::kGradUnsharded, unit, DType::kBFloat16);
  const BufferId sum = b.Buffer(BufferRole::kGradUnshardedAccumulated, unit, kept);
  const BufferId input = b.Buffer(BufferRole::kReduceScatterInput, unit);
  const BufferId reduced = b.Buffer(BufferRole::kGradSharded, unit);
  b.Buffer(BufferRole::kParamSharded, unit);
  const SegmentId backward = b.Backward("backward u", {}, {{unit, 0}});
  b.Step("steady").At(TriggerKind::kStepBegin).Allocate(sum, 0);
  for (const std::int32_t microbatch : {0, 1}) {
    b.At(TriggerKind::kPostBackward, unit, microbatch).Compute(backward, 0, microbatch);
    b.Move(microbatch == 0 ? InstructionKind::kGradCopyIn : InstructionKind::kGradAccumulate, grad, sum, 0);
    b.Free(grad);
  }
  b.Allocate(input, 0).Move(InstructionKind::kGradCast, sum, input, 0).Free(sum);
  b.Allocate(reduced, 0).ReduceScatter(input, reduced, 0).Free(input);
  b.At(TriggerKind::kOptimizerStep).OptimizerStep(0);
  b.At(TriggerKind::kZeroGrad).ZeroGrad();
  return b.plan();
}

TEST_F(Tables, GradientsOfAFlatUnitAreAddedInTheDTypeThatTheyAreMadeIn) {
  EXPECT_THAT(Verify(Accumulating(DType::kBFloat16)), IsEmpty());
  EXPECT_EQ(RulesOf(Accumulating(DType::kFloat32)), Only{"layout"});
}

// ---- arrangements ----

// A sum of one parameter's gradients that is called an input of a reduce-scatter: pieces of all ranks, which
// no copy takes apart again.
TEST_F(Tables, PiecesOfAllRanksBecomeNoOther) {
  Plan plan = Fsdp2LikePlan({.units = 1, .mixed_precision = true, .microbatches = 2});
  ASSERT_THAT(Verify(plan), IsEmpty());
  plan.buffers[BufferNamed(plan, "layers.0.grad_unsharded_accumulated")].role =
      BufferRole::kReduceScatterInput;
  EXPECT_THAT(RulesOf(plan), Contains("layout"));
}

// ---- what segments read ----

TEST_F(Tables, GradientsComeFromAForwardThatHasReadTheUnit) {
  Plan plan = good_;
  for (Segment& segment : plan.segments) {
    if (segment.phase == SegmentPhase::kForward && segment.unit == 1) segment.reads.clear();
  }
  EXPECT_THAT(Verify(plan), IsEmpty());  // without operators forwards need not say what they read
  plan.segments[0].entries.emplace_back(OperatorEvent{.name = "mm"});
  EXPECT_EQ(RulesOf(plan), Only{"compute_order"});
}

// ---- memory that is always there ----

// Parameters that are bound once and for all, and never gathered: only shards have values at first.
TEST_F(Tables, PersistentMemoryForWholeParametersIsEmptyAtFirst) {
  Plan plan = good_;
  for (Buffer& buffer : plan.buffers) {
    buffer.persistent = buffer.persistent || buffer.role == BufferRole::kParamUnsharded;
  }
  const auto names = [&](BufferId id, BufferRole role) { return id >= 0 && plan.buffers[id].role == role; };
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
        return names(i.dst, BufferRole::kAllGatherOutput) || names(i.src, BufferRole::kAllGatherOutput) ||
               names(i.dst, BufferRole::kParamUnsharded) ||
               (i.kind == InstructionKind::kFree && names(i.src, BufferRole::kParamUnsharded));
      });
    }
  }
  EXPECT_THAT(RulesOf(plan), Contains("use_before_unshard"));
}

// ... and without any: what two ranks have pieces of is not whole in either.
TEST_F(Tables, AShardedUnitThatNothingGathersIsNotRead) {
  Plan plan = good_;
  std::set<BufferId> gone;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    Buffer& buffer = plan.buffers[b];
    if (buffer.role != BufferRole::kAllGatherOutput && buffer.role != BufferRole::kParamUnsharded) continue;
    buffer.role = BufferRole::kModelBuffer;
    gone.insert(static_cast<BufferId>(b));
  }
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      std::erase_if(trigger.instructions.Edit(), [&](const Instruction& i) {
        return gone.contains(i.src) || gone.contains(i.dst) || i.kind == InstructionKind::kBindSharded;
      });
    }
  }
  EXPECT_EQ(RulesOf(plan), Only{"use_before_unshard"});
}

// ---- where parameters come from and go to ----

TEST_F(Tables, ParametersComeFromParameters) {
  Plan plan = good_;
  Buffer other = plan.buffers[BufferNamed(plan, "layers.0.param_sharded")];
  other.name = "position";
  other.role = BufferRole::kModelBuffer;
  other.unit = -1;
  other.parameters.clear();
  plan.buffers.push_back(other);
  for (const Spot spot : SpotsOf(plan, InstructionKind::kCopyIn)) {
    Instruction& copy = test::InstructionAt(plan, spot);
    if (plan.buffers[copy.src].unit == 0) copy.src = static_cast<BufferId>(plan.buffers.size() - 1);
  }
  EXPECT_THAT(RulesOf(plan), Contains("layout"));
}

TEST_F(Tables, TheOptimizerAloneWritesAShard) {
  Plan plan = Fsdp1LikePlan({.units = 1, .mixed_precision = true});
  const Spot spot = SpotsOf(plan, InstructionKind::kCopyIn).at(0);
  Instruction back = test::InstructionAt(plan, spot);
  std::swap(back.src, back.dst);
  back.kind = InstructionKind::kCopyToDevice;
  std::vector<Instruction>& all = plan.steps[spot.step].triggers[spot.trigger].instructions.Edit();
  all.insert(all.begin() + spot.instruction + 1, back);
  EXPECT_THAT(RulesOf(plan), Contains("layout"));
}

// A copy of one parameter does not fill a buffer of two that names none of them.
TEST_F(Tables, ACopyFillsWhatItBrings) {
  Plan plan = Fsdp2LikePlan({.units = 1, .parameters = 2});
  for (Buffer& buffer : plan.buffers) {
    if (buffer.role == BufferRole::kParamUnsharded) buffer.parameters.clear();
  }
  ASSERT_THAT(Verify(plan), IsEmpty());
  for (Buffer& buffer : plan.buffers) {
    if (buffer.role != BufferRole::kAllGatherOutput) continue;
    buffer.parameters = {0};
    buffer.parts_bytes[0].value /= 2;
  }
  EXPECT_THAT(RulesOf(plan), Contains("use_before_unshard"));
}

// ---- the optimizer's states ----

TEST_F(Tables, AnOptimizerHasStatesOfAllUnitsThatItStepsOrOfNone) {
  for (const BufferRole role : {BufferRole::kOptimizerTemp, BufferRole::kGradSharded}) {
    Plan plan = good_;
    plan.buffers[BufferNamed(plan, "layers.0.optimizer_state")].role = role;
    EXPECT_THAT(RulesOf(plan), Contains("optimizer_step")) << Name(role);
    EXPECT_EQ(RulesOf(plan).contains("layout"), role == BufferRole::kGradSharded);
  }
}

// The one unit's states, called gradients: there are no others to compare with.
TEST_F(Tables, MemoryForGradientsGetsSome) {
  Plan plan = Fsdp2LikePlan({.units = 1});
  plan.buffers[BufferNamed(plan, "layers.0.optimizer_state")].role = BufferRole::kGradSharded;
  EXPECT_THAT(RulesOf(plan), Contains("layout"));
}

}  // namespace
}  // namespace shardplan::test
