// SPDX-License-Identifier: Apache-2.0
// Operands of instructions: the verifier, the simulator and the replayer's program refuse the same ones.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "replay/program.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/verifier/verifier.h"
#include "tests/support/plan_builder.h"

namespace shardplan::executor {
namespace {

using enum InstructionKind;

constexpr int kKinds = static_cast<int>(kZeroGrad) + 1;

// Roles that src and dst of an instruction of the kind may have: the same, where there is one that both may.
std::array<BufferRole, 2> RolesOf(InstructionKind kind) {
  using enum BufferRole;
  switch (kind) {
    case kBindUnsharded:
      return {kParamUnsharded, kParamUnsharded};
    case kBindSharded:
      return {kParamSharded, kParamSharded};
    case kCopyIn:
      return {kAllGatherInput, kAllGatherInput};
    case kAllGather:
      return {kAllGatherOutput, kAllGatherOutput};
    case kCopyOut:
      return {kParamUnsharded, kParamUnsharded};
    case kReshardPostForward:
      return {kParamUnsharded, kParamPostForwardShard};
    case kGradCopyIn:
      return {kGradUnsharded, kReduceScatterInput};
    case kGradZero:
      return {kGradUnshardedAccumulated, kGradUnshardedAccumulated};
    case kReduceScatter:
      return {kReduceScatterInput, kReduceScatterOutput};
    case kUpdateCopyIn:
    case kUpdateApply:
      return {kUpdatePieces, kUpdatePieces};
    case kOrthogonalize:
      return {kUpdateWhole, kUpdateWhole};
    case kAllToAll:
    case kUpdateGather:
      return {kUpdatePieces, kUpdateWhole};
    case kCompute:
    case kAllocate:
    case kFree:
    case kGradScale:
    case kAllReduce:
    case kGradCast:
    case kGradAccumulate:
    case kCopyToHost:
    case kCopyToDevice:
    case kRecord:
    case kWait:
    case kHostWait:
    case kOptimizerStep:
    case kZeroGrad:
      return {kGradSharded, kGradHost};
  }
  return {};
}

ExchangeId ExchangeOf(InstructionKind kind) { return DescriptionOf(kind).exchange ? 0 : -1; }
std::int32_t MatrixOf(InstructionKind kind) { return kind == kOrthogonalize ? 0 : -1; }

// One rank and one unit, whose pieces are therefore the whole; one of everything that an instruction may
// name. Buffers 0 and 1 are on the device, 2 and 3 the same on the host.
Plan PlanFor(InstructionKind kind) {
  test::PlanBuilder b(1);
  const UnitId unit = b.Unit("u");
  b.MakeFlat(unit);
  b.Event("event");
  b.Forward("forward", {});
  for (const MemoryKind memory : {MemoryKind::kDevice, MemoryKind::kPinnedHost}) {
    for (const BufferRole role : RolesOf(kind)) {
      b.Buffer(role, unit);
      Buffer& buffer = b.plan().buffers.back();
      buffer.name = fmt::format("{}{}", b.plan().buffers.size(), buffer.name);
      buffer.memory = memory;
      buffer.parts_bytes = {Bytes{32}};
    }
  }
  b.plan().exchanges = {
      {.name = "exchange",
       .communicator = 0,
       .matrices = {{.unit = unit, .parameter = 0, .owner = kind == kUpdateGather ? -1 : 0}}}};
  b.plan().cluster.name = "one";
  b.plan().cluster.ranks = 1;
  b.plan().cluster.device.memory_bytes = Bytes{1 << 20};
  b.Step("only").At(TriggerKind::kStepBegin).Do({.kind = kind});
  return b.plan();
}

bool VerifierRefuses(const Plan& plan) {
  return std::ranges::any_of(Verify(plan), [](const Violation& v) { return v.rule == Rule::kReference; });
}

// "": all three refuse it, or none. Else which of them do.
std::string Disagreement(const Plan& plan, const CostModel& costs) {
  const bool verifier = VerifierRefuses(plan);
  const Result<EngineProgram> lowered = LowerPlan(plan, plan.cluster, costs);
  const Result<Program> program = BuildProgram(plan, 0, {});
  if (verifier == !lowered && verifier == !program) return {};
  return fmt::format("verifier: {}, simulator: {}, executor: {}", verifier ? "refuses" : "accepts",
                     lowered ? "accepts" : ToString(lowered.error()),
                     program ? "accepts" : ToString(program.error()));
}

std::string Operands(const Instruction& i) {
  return fmt::format("{} stream {} src {} dst {} event {} communicator {} segment {} unit {}", Name(i.kind),
                     std::int32_t{i.stream}, std::int32_t{i.src}, std::int32_t{i.dst}, std::int32_t{i.event},
                     std::int32_t{i.communicator}, std::int32_t{i.segment}, std::int32_t{i.unit});
}

class Operand : public ::testing::TestWithParam<int> {
 protected:
  const InstructionKind kind_ = static_cast<InstructionKind>(GetParam());
  Plan plan_ = PlanFor(kind_);
  const std::unique_ptr<CostModel> costs_ = MakeCostModel(plan_.cluster);

  void Try(const Instruction& i) {
    plan_.steps[0].triggers[0].instructions.Edit()[0] = i;
    const std::string disagreement = Disagreement(plan_, *costs_);
    EXPECT_EQ(disagreement, "") << Operands(i);
    verifies_ += VerifierRefuses(plan_) ? 0 : 1;
  }
  int verifies_ = 0;
};

TEST_P(Operand, ThereMissingOrOfNothing) {
  constexpr std::array kIds = {-2, -1, 0, 9};
  constexpr std::array kOtherIds = {-1, 0, 9};
  for (const std::int32_t stream : kIds) {
    for (const std::int32_t src : {-2, -1, 0, 2, 9}) {
      for (const std::int32_t dst : {-2, -1, 0, 1, 3, 9}) {
        // Roles are the verifier's alone.
        const bool exists = src >= 0 && src < 9 && dst == 0 && src != dst;
        if (exists && RolesOf(kind_)[0] != RolesOf(kind_)[1]) continue;
        for (const std::int32_t event : kOtherIds) {
          for (const std::int32_t communicator : kOtherIds) {
            for (const std::int32_t segment : kOtherIds) {
              for (const std::int32_t unit : kOtherIds) {
                Try({.kind = kind_,
                     .stream = stream,
                     .unit = unit,
                     .src = src,
                     .dst = dst,
                     .event = event,
                     .communicator = communicator,
                     .segment = segment,
                     .exchange = ExchangeOf(kind_),
                     .matrix = MatrixOf(kind_)});
                if (HasFailure()) return;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(verifies_, 0);
}

TEST_P(Operand, ThatFewInstructionsHave) {
  Instruction whole = {.kind = kind_,
                       .stream = 0,
                       .unit = 0,
                       .src = 0,
                       .dst = 1,
                       .event = 0,
                       .communicator = 0,
                       .segment = 0,
                       .exchange = ExchangeOf(kind_),
                       .matrix = MatrixOf(kind_)};
  Try(whole);
  ASSERT_EQ(verifies_, 1);
  const auto with = [&](auto change) {
    Instruction changed = whole;
    change(changed);
    Try(changed);
  };
  for (const std::int32_t id : {-2, -1, 0, 9}) {
    with([&](Instruction& i) { i.parameter = id; });
    with([&](Instruction& i) { i.parameter = id, i.unit = -1; });
    with([&](Instruction& i) { i.parts = std::vector{id}; });
    with([&](Instruction& i) { i.parts = std::vector{0, id}; });
    with([&](Instruction& i) { i.safe_after = std::vector{id}; });
    with([&](Instruction& i) { i.matrix = id; });
    if (DescriptionOf(kind_).exchange) with([&](Instruction& i) { i.exchange = id; });
  }
  for (const double divisor : {-1.0, 0.0, 2.0}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      with([&](Instruction& i) { i.divisor = divisor, i.reduce_op = op; });
    }
  }
  // A buffer of no unit.
  for (Buffer& buffer : plan_.buffers) {
    if (kind_ != kBindSharded && kind_ != kBindUnsharded) break;
    buffer.unit = -1;
    buffer.parameters.clear();
  }
  with([](Instruction&) {});
  with([](Instruction& i) { i.unit = -1; });
}

INSTANTIATE_TEST_SUITE_P(AllKinds, Operand, ::testing::Range(0, kKinds), [](const auto& info) {
  return std::string(Name(static_cast<InstructionKind>(info.param)));
});

}  // namespace
}  // namespace shardplan::executor
