// SPDX-License-Identifier: Apache-2.0
// The optimizer steps parameters with their reduced gradients, once, and works in memory of its own.
#include <algorithm>
#include <map>

#include "shardplan/schemas/layout.h"
#include "verifier/interpreter.h"
#include "verifier/layout.h"
#include "verifier/rules.h"

namespace shardplan::verifier {

namespace {

// The parameters of the unit that the instruction steps: all without `parameter`, but those of Muon, which
// are stepped one by one.
std::vector<std::int32_t> SteppedBy(const Unit& unit, const Instruction& i) {
  if (i.parameter >= 0) return {i.parameter};
  std::vector<std::int32_t> parameters;
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    if (!unit.parameters[p].muon) parameters.push_back(static_cast<std::int32_t>(p));
  }
  return parameters;
}

bool HoldsOneOf(const Plan& plan, const Buffer& buffer, const std::vector<std::int32_t>& parameters) {
  const std::vector<std::int32_t> held = ParametersOf(plan, buffer);
  return std::ranges::any_of(parameters, [&](std::int32_t p) { return std::ranges::binary_search(held, p); });
}

}  // namespace

// Whether the unit has a gradient of one of the parameters.
bool Interpreter::StepUnit(UnitId unit, const std::vector<std::int32_t>& parameters, const Work& work) {
  std::vector<BufferId> found(plan_.units[unit].parameters.size(), -1);
  bool has_grad = false;
  BufferId moved_on = -1;
  for (const BufferId grad : unit_grads_[unit]) {
    if (!memory_.IsAlive(grad) || !HoldsOneOf(plan_, plan_.buffers[grad], parameters)) continue;
    // Offloaded: the gradient has moved on to the host. The optimizer would find it where it was, too.
    if (gradients_.IsUsedUp(grad)) {
      if (plan_.buffers[grad].role == BufferRole::kGradSharded) moved_on = grad;
      continue;
    }
    // Memory for a gradient may be there before it is (a host's, between steps or since the forward).
    const bool waits = plan_.buffers[grad].persistent || memory_.ContentOf(grad) == Content::kNothing;
    if (waits && gradients_.Contributions(grad).empty()) continue;
    has_grad = true;
    if (OptimizerStepInOtherDType(plan_, grad)) words_.SteppedInOtherDType(grad, work.at);
    memory_.Read(grad, work);
    gradients_.Consume(grad, work.at);
    for (const std::int32_t p : gradients_.Step(grad, parameters, work.at)) {
      const bool same_memory = found[p] >= 0 && memory_.Slot(found[p]) == memory_.Slot(grad);
      if (found[p] >= 0 && !same_memory) words_.InTwoBuffers(unit, p, found[p], grad, work.at);
      found[p] = grad;
    }
  }
  for (const std::int32_t p :
       moved_on < 0 ? std::vector<std::int32_t>() : ParametersOf(plan_, plan_.buffers[moved_on])) {
    const bool same_memory = found[p] >= 0 && memory_.Slot(found[p]) == memory_.Slot(moved_on);
    if (found[p] >= 0 && !same_memory) words_.InTwoBuffers(unit, p, found[p], moved_on, work.at);
  }
  std::vector<std::int32_t> stepped;
  for (std::size_t p = 0; p < found.size(); ++p) {
    if (found[p] >= 0) stepped.push_back(static_cast<std::int32_t>(p));
  }
  OutdateCopies(unit, stepped, work.at);
  return has_grad;
}

void Interpreter::OutdateCopies(UnitId unit, const std::vector<std::int32_t>& parameters, Position at) {
  for (const std::int32_t p : parameters) {
    for (const BufferId copy : unit_copies_[unit]) {
      if (memory_.IsAlive(copy)) memory_.Outdate(copy, p, at);
    }
  }
}

void Interpreter::CheckStatesOf(UnitId unit, const Work& work) {
  std::vector<char> alive;
  for (const BufferId state : unit_states_[unit]) alive.push_back(memory_.IsAlive(state) ? 1 : 0);
  if (OptimizerStepWithoutMemory(alive)) words_.SteppedWithout(unit_states_[unit].front(), unit, work.at);
  if (OptimizerStepWithoutStates(plan_, unit_states_, unit)) words_.SteppedWithoutStates(unit, work.at);
}

void Interpreter::Update(const std::vector<BufferId>& buffers, const Work& work) {
  for (const BufferId buffer : buffers) {
    if (!memory_.IsAlive(buffer)) continue;
    // States are made by the first step: allocated, then filled here.
    if (memory_.ContentOf(buffer) == Content::kEverything) memory_.Read(buffer, work);
    memory_.Write(buffer, work);
    memory_.SetContent(buffer, Content::kEverything);
  }
}

// Temporaries of all units, or of the one that is stepped.
void Interpreter::UseOwnMemory(const Instruction& i, const std::vector<UnitId>& stepped, const Work& work) {
  std::vector<char> alive;
  BufferId first = -1;
  for (const BufferId own : temporaries_) {
    if (plan_.buffers[own].unit != i.unit) continue;
    if (first < 0) first = own;
    alive.push_back(memory_.IsAlive(own) ? 1 : 0);
    if (memory_.IsAlive(own)) memory_.Write(own, work);
  }
  if (!stepped.empty() && OptimizerStepWithoutMemory(alive)) words_.SteppedWithout(first, i.unit, work.at);
}

// The momentum takes in the gradients where pieces are made; the parameters are newer than their copies where
// results are applied.
void Interpreter::RunExchange(const Instruction& i, Position at) {
  const Work work = Issue(i, at);
  exchanges_.Pass(i, at);
  const Exchange& exchange = plan_.exchanges[i.exchange];
  std::map<UnitId, std::vector<std::int32_t>> parameters;
  for (const ExchangedMatrix& matrix : exchange.matrices) {
    std::vector<std::int32_t>& of_unit = parameters[matrix.unit];
    if (std::ranges::find(of_unit, matrix.parameter) == of_unit.end()) of_unit.push_back(matrix.parameter);
  }
  if (i.src >= 0) memory_.Read(i.src, work);
  if (i.kind == InstructionKind::kOrthogonalize) {
    memory_.UsePool(work);
    compute_.Use(i.segment, MicrobatchOfTrigger(at), work);
    memory_.Read(i.dst, work);
  }
  if (i.kind == InstructionKind::kUpdateCopyIn) {
    for (auto& [unit, of_unit] : parameters) {
      std::ranges::sort(of_unit);
      gradients_.CheckNoneUnreduced(unit, at);
      for (const std::int32_t p : of_unit) {
        if (!StepUnit(unit, {p}, work)) words_.SteppedWithoutGradient(unit, p, at);
      }
      CheckStatesOf(unit, work);
      Update(unit_states_[unit], work);
    }
  }
  if (i.kind == InstructionKind::kUpdateApply) {
    for (const auto& [unit, of_unit] : parameters) {
      Update(unit_shards_[unit], work);
      OutdateCopies(unit, of_unit, at);
    }
  }
  if (i.dst >= 0 && memory_.Write(i.dst, work)) memory_.SetContent(i.dst, Content::kEverything);
}

void Interpreter::RunOptimizer(const Instruction& i, Position at) {
  if (i.exchange >= 0) return RunExchange(i, at);
  const Work work = Issue(i, at);
  gradients_.CheckNoneUnreduced(i.unit, at);
  std::vector<UnitId> stepped;
  bool reached = i.stream < 0;  // a step of several units takes those on the device and on the host alike
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const UnitId unit = static_cast<UnitId>(u);
    if (i.unit >= 0 && i.unit != unit) continue;
    if (!StepUnit(unit, SteppedBy(plan_.units[u], i), work)) continue;  // frozen, or not used in this step
    stepped.push_back(unit);
    CheckStatesOf(unit, work);
    Update(unit_shards_[u], work);
    Update(unit_states_[u], work);
    for (const BufferId shard : unit_shards_[u]) {
      const bool on_host = plan_.buffers[shard].memory != MemoryKind::kDevice;
      reached = reached || !on_host;
      if (i.stream < 0 && !on_host) words_.SteppedOutOfReach(shard, on_host, at);
    }
  }
  if (!reached && !stepped.empty() && !unit_shards_[stepped.front()].empty()) {
    words_.SteppedOutOfReach(unit_shards_[stepped.front()].front(), true, at);
  }
  UseOwnMemory(i, stepped, work);
}

// At the end of a step.
void Interpreter::CheckStates() {
  for (const std::vector<BufferId>& states : unit_states_) {
    for (const BufferId state : states) {
      if (memory_.IsAlive(state) && OptimizerStepBeforeState(memory_.Of(state))) {
        words_.AllocatedBehindStep(state, memory_.Of(state).allocated);
      }
    }
  }
}

// ---- the rules ----

std::vector<std::int32_t> OptimizerStepOfDropped(const Gradient& gradient) {
  std::vector<std::int32_t> dropped;
  for (std::size_t p = 0; p < gradient.count.size(); ++p) {
    if (gradient.Has(p) && !gradient.stepped[p]) dropped.push_back(static_cast<std::int32_t>(p));
  }
  return dropped;
}

bool OptimizerStepTwice(const Gradient& gradient, std::int32_t parameter) {
  return gradient.Has(static_cast<std::size_t>(parameter)) && gradient.stepped[parameter] != 0;
}

bool OptimizerStepInOtherDType(const Plan& plan, BufferId grad) {
  const Buffer& buffer = plan.buffers[grad];
  const Unit& unit = plan.units[buffer.unit];
  const Strategy& strategy = plan.strategy;
  if (unit.layout != LayoutKind::kFlat || buffer.role != BufferRole::kGradSharded) return false;
  // An evaluation in full precision keeps its gathered parameters in this buffer.
  if (!AllKeepLowPrecision(strategy) || strategy.fsdp1.full_precision_in_eval) return false;
  if (buffer.dtype != unit.orig_dtype || unit.param_dtype == unit.orig_dtype) return false;
  // A gradient that is not cut stays as it was reduced; one that a hook compressed is decompressed.
  const bool is_cut = SizeBytes(buffer) < Bytes{unit.flat_numel * SizeBytes(buffer.dtype)};
  const bool is_compressed = ReducedIn(plan, unit) != unit.reduce_dtype;
  return is_cut || (!is_compressed && unit.reduce_dtype != unit.orig_dtype);
}

bool OptimizerStepWithoutMemory(const std::vector<char>& alive) {
  return !alive.empty() && std::ranges::none_of(alive, [](char is_alive) { return is_alive != 0; });
}

bool OptimizerStepWithoutStates(const Plan& plan, const std::vector<std::vector<BufferId>>& states,
                                UnitId id) {
  if (!states[id].empty()) return false;
  // Muon has states where the optimizer of the rest may have none.
  const auto has_muon = [&](std::size_t u) {
    return std::ranges::any_of(plan.units[u].parameters, &UnitParameter::muon);
  };
  bool others_have = false;
  for (std::size_t u = 0; u < states.size() && !others_have; ++u)
    others_have = !states[u].empty() && (has_muon(static_cast<std::size_t>(id)) || !has_muon(u));
  if (!others_have) return false;
  // A flat unit counts the original parameters whose pieces the first rank has.
  const Unit& unit = plan.units[id];
  const std::int64_t end = unit.flat_numel / ShardCount(plan, unit);
  return std::ranges::any_of(unit.parameters, [&](const UnitParameter& parameter) {
    return parameter.requires_grad && (unit.layout != LayoutKind::kFlat || parameter.flat_offset < end);
  });
}

bool OptimizerStepBeforeState(const Allocation& state) { return state.content == Content::kNothing; }

std::vector<BufferId> OptimizerStepOfNothing(const Plan& plan) {
  std::vector<char> allocated(plan.buffers.size(), false);
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const BufferRole role = plan.buffers[b].role;
    const bool own = role == BufferRole::kOptimizerState || role == BufferRole::kOptimizerTemp;
    allocated[b] = !own || plan.buffers[b].persistent;
  }
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        const bool exists = i.dst >= 0 && i.dst < std::ssize(plan.buffers);
        if (i.kind == InstructionKind::kAllocate && exists) allocated[i.dst] = true;
      }
    }
  }
  std::vector<BufferId> never;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (!allocated[b]) never.push_back(static_cast<BufferId>(b));
  }
  return never;
}

}  // namespace shardplan::verifier
