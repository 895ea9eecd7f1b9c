// SPDX-License-Identifier: Apache-2.0
#include "verifier/interpreter.h"

#include <algorithm>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/program.h"
#include "verifier/layout.h"
#include "verifier/references.h"
#include "verifier/rules.h"

namespace shardplan::verifier {
namespace {

// By call on a module: does it drop what a pass that raised has left?
std::vector<bool> ResetsOf(const StepProgram& program) {
  std::vector<bool> resets;
  for (const ProgramCall& call : program) {
    if (const auto* of_module = std::get_if<ModuleCall>(&call)) {
      resets.push_back(IsReset(*of_module));
    }
  }
  return resets;
}

}  // namespace

Interpreter::Interpreter(const Plan& plan, Reporter& reporter)
    : plan_(plan),
      reporter_(reporter),
      words_(plan, reporter),
      clocks_(static_cast<std::int32_t>(plan.streams.size()), static_cast<std::int32_t>(plan.events.size())),
      memory_(plan, clocks_, words_),
      gradients_(plan, memory_, words_),
      compute_(plan, clocks_, words_, reporter),
      exchanges_(plan, reporter),
      grad_buffers_(plan),
      activations_(plan),
      bound_(plan.units.size(), -1),
      bound_at_(plan.units.size()),
      unit_shards_(plan.units.size()),
      unit_states_(plan.units.size()),
      unit_grads_(plan.units.size()),
      unit_copies_(plan.units.size()),
      needs_binding_(plan.units.size(), false) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    const BufferId id = static_cast<BufferId>(i);
    if (buffer.role == BufferRole::kOptimizerTemp) temporaries_.push_back(id);
    if (buffer.unit < 0) continue;
    if (buffer.role == BufferRole::kParamSharded) {
      unit_shards_[buffer.unit].push_back(id);
      if (buffer.persistent) memory_.SetCut(id, plan.units[buffer.unit].shard_communicator);
    }
    const bool copies = IsParameterRole(buffer.role) && buffer.role != BufferRole::kParamSharded;
    if (copies) unit_copies_[buffer.unit].push_back(id);
    if (buffer.role == BufferRole::kOptimizerState) unit_states_[buffer.unit].push_back(id);
    if (IsFinalGradient(buffer.role)) unit_grads_[buffer.unit].push_back(id);
    if (buffer.role == BufferRole::kParamUnsharded) needs_binding_[buffer.unit] = true;
  }
  // A flat parameter may be gathered into a buffer of another role that the modules are then bound to.
  // Modules that are bound to shards at some time are bound to whole parameters when they run.
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (DescriptionOf(i.kind).family != InstructionFamily::kBind) continue;
        if (i.unit >= 0 && i.unit < std::ssize(plan.units)) needs_binding_[i.unit] = true;
      }
    }
  }
  // A unit of which several ranks have pieces is whole in none of them.
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    if (IsLong(plan, plan.units[u].shard_communicator)) needs_binding_[u] = true;
  }
  CheckBuffers(plan, reporter);
  compute_.CheckSteps();
  for (const BufferId own : OptimizerStepOfNothing(plan)) words_.NeverAllocated(own);
}

void Interpreter::RunStep(std::int32_t step) {
  memory_.BeginStep();
  compute_.BeginStep();
  const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
  const std::vector<bool> resets = ResetsOf(ProgramOfStep(plan_.strategy, step));
  std::size_t call = 0;  // of the user's on modules, each of which passes a trigger
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    const std::vector<Instruction>& instructions = triggers[t].instructions;
    const bool is_call = triggers[t].kind == TriggerKind::kUserCall;
    resets_ = is_call && call < resets.size() && resets[call];
    if (is_call) ++call;
    compute_.Pass(triggers[t]);
    for (std::size_t k = 0; k < instructions.size(); ++k) {
      const Position at = {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(k)};
      const Instruction& i = instructions[k];
      if (!CheckInstruction(plan_, i, at, reporter_)) continue;
      if (DescriptionOf(i.kind).segment) compute_.Pass(i, triggers[t], at);
      CheckMovement(plan_, i, IsView(i), at, reporter_);
      Run(i, at);
    }
  }
  CheckStates();
  exchanges_.EndStep();
}

void Interpreter::Run(const Instruction& i, Position at) {
  switch (DescriptionOf(i.kind).family) {
    case InstructionFamily::kMemory:
      return RunMemory(i, at);
    case InstructionFamily::kBind:
      return Bind(i, at);
    case InstructionFamily::kOrder:
      return RunOrder(i, at);
    case InstructionFamily::kCompute:
    case InstructionFamily::kCopy:
    case InstructionFamily::kCollective:
    case InstructionFamily::kScale:
    case InstructionFamily::kOptimizer:
      break;
  }
  switch (DescriptionOf(i.kind).value) {
    case ValueEffect::kComputes:
      return RunCompute(i, at);
    case ValueEffect::kUnshards:
      return RunUnshard(i, at);
    case ValueEffect::kReduces:
      return RunGradient(i, at);
    case ValueEffect::kFillsZeros:
      return RunGradZero(i, at);
    case ValueEffect::kMovesMemory:
      return RunCopy(i, at);
    case ValueEffect::kSteps:
      return RunOptimizer(i, at);
    case ValueEffect::kNone:
      break;
  }
  if (DescriptionOf(i.kind).lifetime == LifetimeEffect::kDrops) RunZeroGrad(i, at);
}

void Interpreter::RunMemory(const Instruction& i, Position at) {
  if (DescriptionOf(i.kind).lifetime == LifetimeEffect::kEnds) return Free(i.src, i.parts, i.safe_after, at);
  if (IsActivation(plan_.buffers[i.dst].role)) {
    activations_.Make(i.dst);
    compute_.Take(plan_.buffers[i.dst].storages, MicrobatchOfTrigger(at), /*there=*/true);
  }
  memory_.Allocate(i.dst, i.stream < 0 ? clocks_.host() : i.stream, at);
}

bool Interpreter::IsSingleRank(UnitId unit) const {
  if (unit < 0) return false;
  const CommunicatorId c = plan_.units[unit].shard_communicator;
  return c < 0 || plan_.communicators[c].size == 1;
}

void Interpreter::ReadParameters(UnitId unit, const Work& work, bool evaluates) {
  if (!needs_binding_[unit]) {  // never sharded: the segment reads the parameters themselves
    for (const BufferId buffer : unit_shards_[unit]) {
      memory_.Read(buffer, work, Content::kEverything, Rule::kUseBeforeUnshard);
    }
    return;
  }
  if (UseBeforeUnshard(bound_, unit)) return words_.ReadWhileSharded(unit, bound_at_[unit], work.at);
  const bool readable = memory_.Read(bound_[unit], work, Content::kEverything, Rule::kUseBeforeUnshard);
  if (readable && WrongValueOfBound(plan_, unit, bound_[unit])) {
    words_.ReadsOtherThanParameters(unit, bound_[unit], bound_at_[unit], work.at);
  } else if (readable && WrongValueOfDType(plan_, unit, bound_[unit], evaluates)) {
    words_.ReadsInOtherDType(unit, bound_[unit], bound_at_[unit], work.at);
  }
}

void Interpreter::RunCompute(const Instruction& i, Position at) {
  const Work work = Issue(i, at);
  memory_.UsePool(work);
  const Segment& segment = plan_.segments[i.segment];
  const std::int32_t microbatch = MicrobatchOf(plan_.steps[at.step].triggers[at.trigger], i);
  compute_.Use(i.segment, microbatch, work);
  UseActivations(i.segment, work);
  const bool evaluates = compute_.MayEvaluate(microbatch, at);
  for (const UnitId unit : segment.reads) ReadParameters(unit, work, evaluates);
  for (const SegmentGrad& grad : segment.grads) {
    const BufferId buffer = grad_buffers_.Find(grad, at);
    if (buffer < 0) {
      words_.GradientHasNoBuffer(grad, at);
      continue;
    }
    const BufferId bound = bound_[grad.unit];
    if (bound >= 0 && WrongValueOfGradient(plan_, grad.unit, bound, buffer)) {
      words_.GradientInOtherDType(grad.unit, buffer, bound, at);
    }
    if (!memory_.IsAlive(buffer)) memory_.Allocate(buffer, work.stream, at);
    memory_.Write(buffer, work);
    memory_.SetContent(buffer, Content::kEverything);
    gradients_.Make(grad, buffer, at);
  }
}

// The model's tensors that leave for the host are memory of the plan's, too: of the pool of the stream that
// computes while segments make and free them.
void Interpreter::UseActivations(SegmentId segment, const Work& work) {
  for (const ActivationTouch& touch : activations_.TouchedBy(segment)) {
    if (touch.made.empty()) {
      memory_.Read(touch.buffer, work);
    } else {
      if (!memory_.IsAlive(touch.buffer)) memory_.Allocate(touch.buffer, work.stream, work.at);
      memory_.Write(touch.buffer, work);
      memory_.SetContent(touch.buffer, Content::kEverything);
    }
    activations_.Pass(touch);
    if (activations_.IsEmpty(touch.buffer) && memory_.IsAlive(touch.buffer)) {
      memory_.Free(touch.buffer, {}, work.at);
    }
  }
}

// A copy or a free of activations is of all of them.
bool Interpreter::NeedStorages(BufferId buffer, Position at) {
  const std::vector<StorageId> missing =
      ComputeOrderOfStorages(plan_.buffers[buffer], activations_.There(buffer));
  if (missing.empty() || !memory_.IsAlive(buffer)) return missing.empty();
  words_.StorageIsMissing(buffer, missing.front(), at);
  return false;
}

void Interpreter::CheckBroughtBack(const Instruction& i, Position at) {
  const CopiedActivations copied = activations_.CopiedTo(i.src);
  const CopiedActivations wanted = {memory_.step(), MicrobatchOfTrigger(at)};
  if (ComputeOrderOfBroughtBack(copied, wanted)) {
    words_.BringsBackOthers(i.src, copied.step == wanted.step ? copied.microbatch : -1, at);
  }
}

std::int32_t Interpreter::MicrobatchOfTrigger(Position at) const {
  return plan_.steps[at.step].triggers[at.trigger].microbatch;
}

void Interpreter::Bind(const Instruction& i, Position at) {
  const UnitId unit = i.unit >= 0 ? i.unit : plan_.buffers[i.src].unit;
  const bool unsharded = i.kind == InstructionKind::kBindUnsharded;
  bound_[unit] = unsharded ? i.src : -1;
  bound_at_[unit] = at;
  // Binding is the host's: it needs the memory to be there. The stream that computes has to find the right
  // content in it, finished, and that is checked there. A copy on the host is read by the user.
  const Buffer& bound = plan_.buffers[i.src];
  const bool is_read = bound.memory != MemoryKind::kDevice && bound.role == BufferRole::kParamUnsharded;
  if (is_read || !memory_.IsAlive(i.src)) memory_.Read(i.src, {clocks_.host(), 0, at});  // reports
}

void Interpreter::Free(BufferId buffer, const std::vector<std::int32_t>& parts,
                       const std::vector<StreamId>& safe_after, Position at) {
  const UnitId viewed_by = UseAfterFreeOfBound(plan_, bound_, buffer);
  if (viewed_by >= 0) words_.FreedWhileBound(viewed_by, buffer, bound_at_[viewed_by], at);
  if (plan_.buffers[buffer].role == BufferRole::kActivation) {
    NeedStorages(buffer, at);
    activations_.Drop(buffer);
    compute_.Take(plan_.buffers[buffer].storages, MicrobatchOfTrigger(at), /*there=*/false);
  }
  if (!parts.empty()) return memory_.FreeParts(buffer, parts, safe_after, at);
  std::int32_t slot = -1;
  if (memory_.IsAlive(buffer)) {
    slot = memory_.Slot(buffer);
    // Another name goes on with what is in it.
    if (memory_.Of(buffer).names == 1) Release(buffer, at);
  }
  if (memory_.Free(buffer, safe_after, at)) gradients_.Drop(slot, buffer, at);
}

// Gradients that a raised pass has made belong to nobody.
void Interpreter::Release(BufferId grad, Position at) {
  if (resets_) gradients_.Discard(grad);
  gradients_.Release(grad, at);
}

bool Interpreter::IsView(const Instruction& i) const {
  return DescriptionOf(i.kind).lifetime == LifetimeEffect::kView && memory_.IsAlive(i.src) &&
         MakesView(plan_, i, memory_.IsAlive(i.dst));
}

// Which ranks have the other pieces of what an instruction of unshard or reshard moves.
void Interpreter::CutPieces(const Instruction& i, Position at) {
  if (!IsParameterRole(plan_.buffers[i.src].role) || !memory_.IsAlive(i.src) || !memory_.IsAlive(i.dst))
    return;
  const CommunicatorId cut = memory_.Of(i.src).cut_over;
  if (i.kind == InstructionKind::kAllGather) {
    if (WrongValueOfPieces(plan_, memory_.Of(i.src), i.communicator))
      words_.GatheredOverOthers(i.src, cut, at);
    return memory_.SetCut(i.dst, i.communicator);
  }
  if (i.kind == InstructionKind::kReshardPostForward) {
    return memory_.SetCut(i.dst, plan_.units[plan_.buffers[i.dst].unit].post_forward_communicator);
  }
  const Allocation& into = memory_.Of(i.dst);
  const bool mixes = !into.filled_parameters.empty() && into.cut_over != cut;
  const bool says_others =
      i.communicator >= 0 && WrongValueOfPieces(plan_, memory_.Of(i.src), i.communicator);
  if (mixes && into.cut_over >= 0) words_.GatheredOverOthers(i.dst, into.cut_over, at);
  if (says_others) words_.GatheredOverOthers(i.src, cut, at);
  memory_.SetCut(i.dst, cut);
}

// Whether what an instruction of unshard or reshard moves are the parameters of today.
void Interpreter::Age(const Instruction& i, Position at) {
  if (!IsParameterRole(plan_.buffers[i.src].role) || !memory_.IsAlive(i.src) || !memory_.IsAlive(i.dst))
    return;
  if (WrongValueOfOutdated(plan_, memory_.Of(i.src), i.dst)) {
    words_.MovesOutdated(i.src, memory_.Of(i.src).outdated_at, at);
  }
  memory_.PassAge(i.src, i.dst);
}

void Interpreter::RunUnshard(const Instruction& i, Position at) {
  const Work work = Issue(i, at);
  const bool gathers = IsCollective(i.kind);
  const bool in_place = gathers && i.src == i.dst;
  const BufferId other = gathers ? -1 : i.dst;
  memory_.Read(i.src, work, in_place ? Content::kOwnSlot : Content::kEverything, Rule::kReadBeforeWrite,
               other);
  CutPieces(i, at);
  Age(i, at);
  if (!memory_.Write(i.dst, work)) return;
  const bool slot_only = DescriptionOf(i.kind).movement == Movement::kToSlot &&
                         plan_.buffers[i.dst].role != BufferRole::kAllGatherInput &&
                         !IsSingleRank(plan_.buffers[i.dst].unit);
  const Content content = slot_only ? Content::kOwnSlot : Content::kEverything;
  other >= 0 ? memory_.FillFrom(i.src, i.dst, content) : memory_.SetContent(i.dst, content);
}

void Interpreter::RunGradient(const Instruction& i, Position at) {
  // A cast to the same dtype with no memory of its own is a view: a second name, no work.
  if (IsView(i)) {
    memory_.MakeAlias(i.dst, i.src);
    return;
  }
  const Work work = Issue(i, at);
  const bool readable = memory_.Read(i.src, work);
  if (!Has(DescriptionOf(i.kind).dst)) {  // in place
    if (!readable) return;
    memory_.Write(i.src, work);
    gradients_.Change(i, at);
    return;
  }
  const bool adds = DescriptionOf(i.kind).arithmetic == Arithmetic::kAdd && memory_.IsAlive(i.dst) &&
                    memory_.ContentOf(i.dst) == Content::kEverything;
  if (adds) memory_.Read(i.dst, work);
  if (!memory_.Write(i.dst, work)) return;
  memory_.SetContent(i.dst, Content::kEverything);
  if (readable) gradients_.Move(i, at);
}

void Interpreter::RunGradZero(const Instruction& i, Position at) {
  if (!memory_.Write(i.dst, Issue(i, at))) return;
  memory_.SetContent(i.dst, Content::kEverything);
  gradients_.Zero(i.dst, at);
}

void Interpreter::RunCopy(const Instruction& i, Position at) {
  const Work work = Issue(i, at);
  const BufferRole from = plan_.buffers[i.src].role;
  if (from == BufferRole::kActivation && NeedStorages(i.src, at)) {
    activations_.CopyOut(i.dst, {memory_.step(), MicrobatchOfTrigger(at)});
  }
  if (from == BufferRole::kActivationHost) CheckBroughtBack(i, at);
  const bool readable = memory_.Read(i.src, work);
  CutPieces(i, at);
  Age(i, at);
  if (!memory_.Write(i.dst, work)) return;
  memory_.SetContent(i.dst, Content::kEverything);
  if (readable) gradients_.Move(i, at);
}

void Interpreter::RunOrder(const Instruction& i, Position at) {
  const OrderEffect order = DescriptionOf(i.kind).order;
  if (order == OrderEffect::kRecords) {
    clocks_.Record(i.event, i.stream);
    return;
  }
  const bool host = order == OrderEffect::kHostWaits;
  if (WaitBeforeRecord(clocks_, i.event)) {
    words_.WaitedForNothing(i.event, at);
    if (!host) clocks_.MarkStuck(i.stream, at);
    return;
  }
  if (host && Deadlock(clocks_, i.event)) words_.HostWaitsForever(i.event, clocks_.StuckAt(i.event), at);
  clocks_.Wait(host ? clocks_.host() : i.stream, i.event);
}

void Interpreter::RunZeroGrad(const Instruction& i, Position at) {
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    if (i.unit >= 0 && i.unit != static_cast<UnitId>(u)) continue;
    for (const BufferId grad : unit_grads_[u]) {
      if (!memory_.IsAlive(grad)) continue;
      Release(grad, at);
      if (!plan_.buffers[grad].persistent) Free(grad, {}, {}, at);
    }
  }
}

Snapshot Interpreter::TakeSnapshot() const {
  Snapshot snapshot;
  snapshot.bound = bound_;
  snapshot.buffers.resize(plan_.buffers.size());
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const BufferId buffer = static_cast<BufferId>(b);
    if (!memory_.IsAlive(buffer)) continue;
    snapshot.buffers[b] = {true, memory_.ContentOf(buffer), gradients_.Contributions(buffer)};
  }
  return snapshot;
}

bool Interpreter::CheckBuffer(BufferId buffer, const BufferState& before, const BufferState& after,
                              std::int32_t first_step) {
  // Temporaries that outlive a step are forgotten ones, whoever steps beside them.
  const bool used = after.alive && memory_.Of(buffer).used_step >= first_step &&
                    plan_.buffers[buffer].role != BufferRole::kOptimizerTemp;
  switch (Leak(before, after, plan_.buffers[buffer].persistent, used)) {
    case LeakFault::kHolds:
      break;
    case LeakFault::kNotFreed:
      leaves_over_ = true;
      words_.NotFreed(buffer, memory_.Of(buffer).allocated);
      return false;
    case LeakFault::kNotUsed:
      words_.NeverUsed(buffer, memory_.Of(buffer).allocated);
      return false;
  }
  // Memory that is always there is filled in the first round.
  BufferState held = before;
  if (plan_.buffers[buffer].persistent) held.content = std::max(before.content, after.content);
  switch (SteadyState(held, after)) {
    case SteadyFault::kHolds:
      return true;
    case SteadyFault::kGone:
      words_.GoneAtEnd(buffer);
      return false;
    case SteadyFault::kContent:
      words_.OtherContentAtEnd(buffer, before.content);
      return false;
    case SteadyFault::kGradients:
      words_.OtherGradientsAtEnd(buffer);
      return false;
  }
  return true;
}

bool Interpreter::CheckCycle(const Snapshot& before, std::int32_t steps_in_cycle) {
  const Snapshot after = TakeSnapshot();
  SHARDPLAN_ASSERT(before.buffers.size() == after.buffers.size(), "a snapshot has all buffers of the plan");
  const std::int32_t first_step = memory_.step() - steps_in_cycle + 1;
  bool good = true;
  for (std::size_t b = 0; b < after.buffers.size(); ++b) {
    const BufferId buffer = static_cast<BufferId>(b);
    good = CheckBuffer(buffer, before.buffers[b], after.buffers[b], first_step) && good;
  }
  for (const UnitId unit : SteadyStateOfUnits(before, after)) {
    words_.OtherBindingAtEnd(unit, before.bound[unit], after.bound[unit]);
    good = false;
  }
  return good;
}

}  // namespace shardplan::verifier
