// SPDX-License-Identifier: Apache-2.0
// Rule tables and its neighbours: what segments, procedures and steps say of each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/schemas/verifier/rules.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using Only = std::set<std::string>;

class ProgramTables : public Rules {};

// ---- what segments read and make ----

// Every segment that reads a unit has an operator that reads its parameters.
Plan WithOperators(Plan plan) {
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t p = 0; p < plan.units[u].parameters.size(); ++p) {
      plan.units[u].parameters[p].index = static_cast<std::int32_t>(10 * u + p);
    }
  }
  for (Segment& segment : plan.segments) {
    OperatorEvent op{.name = "mm"};
    for (const UnitId unit : segment.reads) op.parameters.push_back(plan.units[unit].parameters[0].index);
    segment.entries.emplace_back(op);
  }
  return plan;
}

TEST_F(ProgramTables, SegmentsReadTheUnitsThatTheirOperatorsRead) {
  const Plan good = WithOperators(Fsdp2LikePlan({.parameters = 2}));
  ASSERT_THAT(Verify(good), IsEmpty());
  Plan plan = good;
  std::get<OperatorEvent>(plan.segments[0].entries[0]).parameters = {10};
  EXPECT_EQ(RulesOf(plan), Only{"tables"});
  EXPECT_THAT(Verify(plan)[0].message,
              HasSubstr("its operators read parameter 10, and it does not say that it reads layers.1"));
  std::get<OperatorEvent>(plan.segments[0].entries[0]).parameters = {};  // it says that it reads more
  EXPECT_THAT(Verify(plan), IsEmpty());
  std::get<OperatorEvent>(plan.segments[0].entries[0]).parameters = {0, 1, 99};  // 99: of no unit
  EXPECT_THAT(Verify(plan), IsEmpty());
  plan.segments[0].reads.clear();
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
}

// One of the units that have a parameter is enough.
TEST_F(ProgramTables, ASharedParameterIsReadInOneOfItsUnits) {
  Plan plan = WithOperators(good_);
  plan.units[1].parameters[0].index = plan.units[0].parameters[0].index;
  for (Segment& segment : plan.segments) {
    std::get<OperatorEvent>(segment.entries[0]).parameters = {plan.units[0].parameters[0].index};
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST_F(ProgramTables, GradientsAreMadeOfParametersThatTrain) {
  good_.units[0].parameters[0].requires_grad = false;
  EXPECT_EQ(RulesOf(good_), Only{"tables"});
  EXPECT_THAT(Verify(good_)[0].message,
              HasSubstr("it makes the gradient of layers.0.p0 of layers.0, which is frozen"));
}

TEST_F(ProgramTables, GradientsThatABackwardAllocatesAreMade) {
  Plan plan = WithOperators(Fsdp2LikePlan({.parameters = 2}));
  Segment* backward = nullptr;
  for (Segment& segment : plan.segments) {
    if (segment.phase == SegmentPhase::kBackward && segment.unit == 0) backward = &segment;
  }
  const auto allocate = [&](ParameterId parameter) {
    backward->entries.emplace_back(
        AllocateEvent{.storage = 7, .role = StorageRole::kParameterGrad, .parameter = parameter});
  };
  allocate(plan.units[0].parameters[1].index);
  allocate(99);  // of no unit
  EXPECT_THAT(Verify(plan), IsEmpty());
  std::erase_if(backward->grads, [](const SegmentGrad& grad) { return grad.parameter == 1; });
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
  EXPECT_THAT(Verify(plan)[0].message,
              HasSubstr("allocates the gradient of parameter 1, of layers.0, and none"));
}

// With original parameters the flat gradient has zeros for those that are frozen.
TEST_F(ProgramTables, AFlatParameterTrainsWhereOneOfItsOriginalsDoes) {
  Plan plan = Fsdp1LikePlan({.units = 1});
  Unit& unit = plan.units[0];
  unit.parameters.push_back(unit.parameters[0]);
  unit.parameters[1].shape = {0};
  unit.parameters[1].flat_offset = unit.flat_numel;
  unit.parameters[0].requires_grad = false;
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
  plan.strategy.fsdp1.use_orig_params = true;
  EXPECT_THAT(RulesOf(plan), Not(Contains("tables")));
  plan.units[0].parameters[1].requires_grad = false;
  EXPECT_THAT(RulesOf(plan), Contains("tables"));
}

// ---- procedures ----

using enum ProcedureKind;

Plan WithProcedures(Plan plan, const std::vector<ProcedureKind>& kinds) {
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (const ProcedureKind kind : kinds) plan.procedures.push_back({kind, static_cast<UnitId>(u), {}});
  }
  return plan;
}

bool LacksProcedures(const Plan& plan) { return RulesOf(plan).contains("tables"); }

TEST_F(ProgramTables, ProceduresThatGoTogetherAreAllThere) {
  const Plan low = Fsdp2LikePlan({.mixed_precision = true});
  const std::vector<ProcedureKind> keeping = {kUnshard,         kReshard,           kReduce,    kAccumulate,
                                              kAccumulateAgain, kReduceAccumulated, kReduceKept};
  EXPECT_FALSE(LacksProcedures(WithProcedures(low, keeping)));
  EXPECT_FALSE(LacksProcedures(WithProcedures(low, {kUnshard, kReshard, kReduce})));
  EXPECT_FALSE(LacksProcedures(WithProcedures(good_, {kUnshard, kReshard, kReduce})));
  for (std::size_t k = 0; k < keeping.size(); ++k) {
    std::vector<ProcedureKind> some = keeping;
    some.erase(some.begin() + k);
    EXPECT_TRUE(LacksProcedures(WithProcedures(low, some))) << Name(keeping[k]);
  }
  EXPECT_THAT(Verify(WithProcedures(low, {kUnshard, kReshard, kReduce, kAccumulate}))[0].message,
              HasSubstr("unit layers.0 has no procedure accumulate_again"));
}

TEST_F(ProgramTables, ProceduresInTheOriginalDTypeGoTogether) {
  const Plan low = Fsdp1LikePlan({.mixed_precision = true});
  const std::vector<ProcedureKind> full = {kUnshard, kReshard, kUnshardFullPrecision, kReshardFullPrecision};
  EXPECT_FALSE(LacksProcedures(WithProcedures(low, full)));
  EXPECT_TRUE(LacksProcedures(WithProcedures(low, {kUnshard, kReshard, kReshardFullPrecision})));
  EXPECT_TRUE(LacksProcedures(WithProcedures(low, {kUnshard, kReshard, kUnshardFullPrecision})));
}

// Every unit has what is done on demand with one.
TEST_F(ProgramTables, EveryUnitHasTheProceduresOfTheOthers) {
  const Plan good = WithProcedures(good_, {kUnshard, kReshard, kReduce});
  for (std::size_t p = 0; p < good.procedures.size(); ++p) {
    Plan plan = good;
    plan.procedures.erase(plan.procedures.begin() + p);
    EXPECT_TRUE(LacksProcedures(plan)) << p;
  }
  Plan plan = good;
  plan.procedures.pop_back();  // layers.1 is not reduced
  plan.units[1].parameters[0].requires_grad = false;
  for (Segment& segment : plan.segments)
    std::erase_if(segment.grads, [](const SegmentGrad& g) { return g.unit == 1; });
  EXPECT_FALSE(LacksProcedures(plan));
}

// In the program that the procedures are verified as, another procedure has recorded the event.
TEST_F(ProgramTables, AProcedureWaitsForWhatItRecords) {
  Plan plan = WithProcedures(good_, {kUnshard, kReshard});
  plan.events.emplace_back("apart");
  const EventId event = static_cast<EventId>(plan.events.size()) - 1;
  const Instruction record = {.kind = InstructionKind::kRecord, .stream = 0, .event = event};
  const Instruction wait = {.kind = InstructionKind::kWait, .stream = 0, .event = event};
  plan.procedures[0].instructions.Edit() = {record};
  plan.procedures[1].instructions.Edit() = {wait};
  const auto unrecorded = [&] {
    std::vector<Violation> found;
    for (Violation& violation : Verify(plan)) {
      if (violation.rule == Rule::kWaitBeforeRecord) found.push_back(std::move(violation));
    }
    return found;
  };
  ASSERT_THAT(unrecorded(), SizeIs(1));
  EXPECT_EQ(unrecorded()[0].procedure, 1);
  EXPECT_EQ(unrecorded()[0].instruction, 0);
  plan.procedures[1].instructions.Edit() = {record, wait};
  EXPECT_THAT(unrecorded(), IsEmpty());
}

// ---- steps ----

TEST_F(ProgramTables, LazyInitIsNotRepeated) {
  const auto with_lazy_init_in = [&](std::size_t step) {
    Plan plan = good_;
    std::vector<Trigger>& triggers = plan.steps[step].triggers;
    triggers.insert(triggers.begin() + 1, Trigger{.kind = TriggerKind::kLazyInit});
    return plan;
  };
  EXPECT_THAT(Verify(with_lazy_init_in(0)), IsEmpty());
  const std::vector<Violation> violations = Verify(with_lazy_init_in(1));
  ASSERT_THAT(violations, SizeIs(1));
  EXPECT_EQ(Name(violations[0].rule), "steady_state");
  EXPECT_EQ(violations[0].trigger, 1);
}

// A program repeats its last step: the plan may go on with an earlier one only if that has the same calls.
TEST_F(ProgramTables, ThePlanGoesOnWithTheStepThatTheProgramRepeats) {
  Plan plan = good_;
  ASSERT_EQ(plan.steady_step, 1);
  const StepProgram step = {ForwardCall{}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}};
  plan.strategy.program = {step, step, step};
  EXPECT_THAT(Verify(plan), IsEmpty());
  plan.strategy.program.push_back({ForwardCall{}, BackwardCall{}});
  const std::vector<Violation> violations = Verify(plan);
  ASSERT_THAT(violations, SizeIs(1));
  EXPECT_EQ(Name(violations[0].rule), "tables");
  EXPECT_EQ(violations[0].step, 1);
  EXPECT_THAT(violations[0].message, HasSubstr("has other calls in step 3"));
}

// ---- the optimizer's states ----

TEST_F(ProgramTables, AStateIsAllocatedBeforeTheStepThatMakesIt) {
  const Plan good = Fsdp2LikePlan({.units = 1});
  const BufferId second = static_cast<BufferId>(good.buffers.size());
  const Spot spot = [&] {
    for (const Spot s : SpotsOf(good, InstructionKind::kAllocate)) {
      if (good.buffers[InstructionAt(good, s).dst].role == BufferRole::kOptimizerState) return s;
    }
    return Spot{};
  }();
  const auto allocated_at = [&](std::size_t behind) {
    Plan plan = good;
    plan.buffers.push_back(plan.buffers[InstructionAt(plan, spot).dst]);
    plan.buffers.back().name += ".second";
    Instruction allocate = InstructionAt(plan, spot);
    allocate.dst = second;
    std::vector<Instruction>& all = plan.steps[spot.step].triggers[spot.trigger].instructions.Edit();
    all.insert(all.begin() + spot.instruction + behind, allocate);
    return RulesOf(plan);
  };
  EXPECT_THAT(allocated_at(1), IsEmpty());
  EXPECT_EQ(allocated_at(2), Only{"optimizer_step"});  // behind the step
}

// ---- tensors of the model on several streams ----

class SeveralStreams : public ::testing::Test {
 protected:
  SeveralStreams() {
    const auto segment = [&](const char* name, std::vector<SegmentEntry> entries) {
      const SegmentId id = b_.Forward(name, {});
      b_.plan().segments[id].entries = std::move(entries);
      return id;
    };
    make_ = segment("make", {AllocateEvent{.storage = 0, .size_bytes = Bytes{8}}});
    read_ = segment("read", {OperatorEvent{.name = "mm", .reads = {0}}});
    write_ = segment("write", {OperatorEvent{.name = "add_", .writes = {0}}});
    free_ = segment("free", {FreeEvent{.storage = 0}});
    other_ = b_.Stream("other");
    b_.Step("steady").At(TriggerKind::kStepBegin);
  }
  std::set<std::string> Found() { return RulesOf(b_.plan()); }

  PlanBuilder b_;
  SegmentId make_ = -1, read_ = -1, write_ = -1, free_ = -1;
  StreamId other_ = -1;
};

TEST_F(SeveralStreams, AreOrderedWhereTheyShareTensors) {
  b_.Compute(make_)
      .Sync(0, other_)
      .Compute(read_, other_)
      .Compute(write_, other_)
      .Sync(other_, 0)
      .Compute(free_);
  EXPECT_THAT(Found(), IsEmpty());
}

TEST_F(SeveralStreams, AKernelReadsWhatAnotherStreamHasWritten) {
  b_.Compute(make_).Compute(read_, other_).Compute(write_).Sync(other_, 0).Compute(free_);
  EXPECT_EQ(Found(), (Only{"read_before_write", "write_race"}));
  EXPECT_THAT(Verify(b_.plan())[0].message, HasSubstr("reads storage 0 of the model"));
}

TEST_F(SeveralStreams, AKernelWritesOrFreesWhatNoOtherStreamUses) {
  b_.Compute(make_).Compute(write_).Sync(0, other_).Compute(read_, other_).Compute(free_);
  EXPECT_EQ(Found(), Only{"write_race"});
}

// ---- remarks ----

// The shards are gathered before the optimizer steps, and copied out in the next step.
TEST(StaleParameters, AreThoseOfAnOldGather) {
  PlanBuilder b;
  const UnitId unit = b.Unit("u");
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId gathered = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const BufferId whole = b.Buffer(BufferRole::kParamUnsharded, unit);
  const SegmentId forward = b.Forward("forward u", {unit});
  b.plan().buffers[gathered].persistent = true;
  const auto step = [&](bool gathers_late) {
    b.plan().steps.clear();
    b.Step("steady").At(TriggerKind::kPreForward, unit).Allocate(whole, 0);
    if (gathers_late) b.CopyIn(shard, gathered, 0).AllGather(gathered, gathered, 0);
    b.CopyOut(gathered, whole, 0).Bind(whole).Compute(forward);
    b.At(TriggerKind::kPostForward, unit).BindSharded(shard).Free(whole);
    if (!gathers_late) b.CopyIn(shard, gathered, 0).AllGather(gathered, gathered, 0);
    b.At(TriggerKind::kOptimizerStep).OptimizerStep(0);
    std::set<std::string> kinds;
    for (const Remark& remark : Remarks(b.plan())) kinds.emplace(Name(remark.kind));
    return kinds;
  };
  EXPECT_THAT(step(true), Not(Contains("stale_parameters")));
  EXPECT_THAT(step(false), Contains("stale_parameters"));
}

// The shard of the smaller mesh is cut from what is gathered, and gathered again a step later.
TEST(StaleParameters, AreThoseOfAnOldPostForwardShard) {
  PlanBuilder b;
  const UnitId unit = b.Unit("u");
  const BufferId shard = b.Buffer(BufferRole::kParamSharded, unit);
  const BufferId kept = b.Buffer(BufferRole::kParamPostForwardShard, unit);
  const BufferId gathered = b.Buffer(BufferRole::kAllGatherOutput, unit);
  const BufferId whole = b.Buffer(BufferRole::kParamUnsharded, unit);
  const SegmentId forward = b.Forward("forward u", {unit});
  const auto remarks = [&](BufferId first_from) {
    b.plan().steps.clear();
    b.Step("steady").At(TriggerKind::kPreForward, unit).Allocate(gathered, 0).Allocate(whole, 0);
    b.CopyIn(first_from, gathered, 0).AllGather(gathered, gathered, 0).CopyOut(gathered, whole, 0);
    b.Bind(whole).Compute(forward).Move(InstructionKind::kReshardPostForward, whole, kept, 0);
    b.At(TriggerKind::kPostForward, unit).BindSharded(shard).Free(whole).Free(gathered);
    b.At(TriggerKind::kOptimizerStep).OptimizerStep(0);
    std::set<std::string> kinds;
    for (const Remark& remark : Remarks(b.plan())) kinds.emplace(Name(remark.kind));
    return kinds;
  };
  EXPECT_THAT(remarks(shard), Not(Contains("stale_parameters")));
  EXPECT_THAT(remarks(kept), Contains("stale_parameters"));
}

}  // namespace
}  // namespace shardplan::test
