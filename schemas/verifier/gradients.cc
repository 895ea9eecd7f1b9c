// SPDX-License-Identifier: Apache-2.0
#include "verifier/gradients.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/layout.h"
#include "verifier/rules.h"

namespace shardplan::verifier {

namespace {

// How often the user's calls of a step the optimizer, at most; an optimizer in the backward steps by itself.
std::int64_t StepsOfOptimizer(const Strategy& strategy) {
  if (strategy.optimizer.kind == OptimizerKind::kNone) return 0;
  if (strategy.optimizer.in_backward || strategy.program.empty()) return 1;
  std::int64_t most = 0;
  for (const StepProgram& step : strategy.program) {
    most = std::max<std::int64_t>(most, std::ranges::count_if(step, [](const ProgramCall& call) {
                                    return std::holds_alternative<OptimizerStepCall>(call);
                                  }));
  }
  return most;
}

}  // namespace

Gradients::Gradients(const Plan& plan, const Memory& memory, Words& words)
    : plan_(plan),
      memory_(memory),
      words_(words),
      steps_(StepsOfOptimizer(plan.strategy) > 0),
      may_step_again_(StepsOfOptimizer(plan.strategy) > 1) {}

Gradient& Gradients::At(BufferId buffer) {
  SHARDPLAN_ASSERT(memory_.IsAlive(buffer), "a gradient is in memory");
  const std::size_t slot = memory_.Slot(buffer);
  if (slot >= values_.size()) values_.resize(slot + 1);
  return values_[slot];
}

std::vector<std::int32_t> Gradients::HeldOf(BufferId buffer, UnitId unit) const {
  const Buffer& b = plan_.buffers[buffer];
  if (b.unit >= 0) return b.unit == unit ? ParametersOf(plan_, b) : std::vector<std::int32_t>();
  std::vector<std::int32_t> all(plan_.units[unit].parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void Gradients::Make(const SegmentGrad& grad, BufferId buffer, Position at) {
  Gradient& value = At(buffer);
  if (GradNotReducedButMoved(value)) {
    words_.AddedToMovedGradient(value, buffer, at);
    value = {};
  }
  if (value.unit >= 0 && value.unit != grad.unit) {  // it came through a buffer of no unit
    words_.AddedToUnlike(value, buffer, at);
    value = {};
  }
  if (value.unit < 0) {
    value = NothingOf(grad.unit);
  }
  SHARDPLAN_ASSERT(grad.parameter < std::ssize(value.count),
                   "CheckTables lets only parameters of the unit through");
  ++value.count[grad.parameter];
  value.stepped[grad.parameter] = 0;
  if (value.history.empty() || !(value.history.back() == at)) value.history.push_back(at);
}

Gradient Gradients::NothingOf(UnitId unit) const {
  Gradient value;
  value.unit = unit;
  value.count.assign(plan_.units[unit].parameters.size(), 0);
  value.zero.assign(value.count.size(), 0);
  value.stepped.assign(value.count.size(), 0);
  return value;
}

void Gradients::Zero(BufferId buffer, Position at) {
  Gradient& value = At(buffer);
  if (GradNotReducedButLost(value)) words_.Overwritten(value, buffer, at);
  value = NothingOf(plan_.buffers[buffer].unit);
  for (const std::int32_t p : HeldOf(buffer, value.unit)) value.zero[p] = 1;
  value.history.push_back(at);
}

// The part of `source` that the instruction takes: the parameters that both buffers hold. The part that is
// taken is used up.
Gradient Gradients::Select(Gradient& source, const Instruction& instruction, Position at) {
  if (GradNotReducedButMoved(source)) words_.TakenAgain(source, instruction.src, at);
  std::vector<std::int32_t> parameters = HeldOf(instruction.src, source.unit);
  const std::vector<std::int32_t> held = HeldOf(instruction.dst, source.unit);
  std::erase_if(parameters, [&](std::int32_t p) { return !std::ranges::binary_search(held, p); });
  for (const std::int32_t p : ReadBeforeWriteOfGradient(plan_, source, parameters)) {
    words_.GradientNotMade(source, p, instruction.src, at);
  }
  Gradient taken = source;
  taken.used_up = false;
  taken.checked = false;
  taken.count.assign(source.count.size(), 0);
  taken.zero.assign(source.count.size(), 0);
  Gradient left = source;
  for (const std::int32_t p : parameters) {
    std::swap(taken.count[p], left.count[p]);
    std::swap(taken.zero[p], left.zero[p]);
  }
  source.history.push_back(at);
  bool all_taken = true;
  for (std::size_t p = 0; p < left.count.size(); ++p) all_taken = all_taken && !left.Has(p);
  source.used_up = source.used_up || all_taken;
  if (!all_taken) {
    source.count = std::move(left.count);
    source.zero = std::move(left.zero);
  }
  return taken;
}

// A second copy-in may fill the parameters that the first one left.
bool Gradients::JoinOther(Gradient& into, const Gradient& value) const {
  if (GradNotReducedAlike(into, value) || GradDivisionOfSum(into, value)) return false;
  for (std::size_t p = 0; p < into.count.size(); ++p) {
    if (into.count[p] > 0 && value.count[p] > 0) return false;
  }
  for (std::size_t p = 0; p < into.count.size(); ++p) {
    into.count[p] += value.count[p];
    into.zero[p] = static_cast<char>(into.zero[p] | value.zero[p]);
  }
  into.history.insert(into.history.end(), value.history.begin(), value.history.end());
  return true;
}

// A reduction that is not one of FSDP's own two: the user's all-reduce hook, or the partial sums that tensor
// parallelism leaves.
bool Gradients::IsForeign(const Gradient& value, const Instruction& instruction) const {
  const Unit& unit = plan_.units[value.unit];
  const CommunicatorId used = instruction.communicator;
  if (instruction.kind != InstructionKind::kAllReduce ||
      SameGroups(plan_, used, unit.replicate_communicator) ||
      SameGroups(plan_, used, unit.shard_communicator)) {
    return false;
  }
  if (SameGroups(plan_, used, unit.hook_communicator)) return true;
  for (const std::int32_t p : HeldOf(instruction.src, value.unit)) {
    for (const ParameterPlacement& placement : unit.parameters[p].placements) {
      if (placement.grad_partial && placement.size == plan_.communicators[used].size) return true;
    }
  }
  return false;
}

void Gradients::Reduce(Gradient& value, const Instruction& instruction, Position at) {
  const Unit& unit = plan_.units[value.unit];
  const CommunicatorId used = instruction.communicator;
  value.divisor *= instruction.divisor;
  if (instruction.reduce_op == ReduceOp::kAverage) {
    value.divisor *= static_cast<double>(plan_.communicators[used].size);
  }
  if (IsForeign(value, instruction)) return;
  const bool over_shards = instruction.kind == InstructionKind::kReduceScatter ||
                           (SameGroups(plan_, used, unit.shard_communicator) &&
                            !SameGroups(plan_, used, unit.replicate_communicator));
  switch (GradNotReducedRight(plan_, value, used, over_shards)) {
    case ReductionFault::kHolds:
      break;
    case ReductionFault::kTwice:
      words_.ReducedTwice(value, at);
      break;
    case ReductionFault::kOtherRanks:
      words_.ReducedOverOtherRanks(value, at);
      break;
  }
  if (!over_shards) {
    value.replicated = true;
  } else if (unit.inner_reduce_communicator >= 0 && !value.inner) {
    value.inner = true;
  } else {
    value.sharded = true;
  }
}

// Adding to an average over all ranks, which every rank holds, what one rank made: the average of the sums is
// the sum of the averages.
bool Gradients::AddsToAverage(const Gradient& into, const Gradient& value) const {
  const Unit& unit = plan_.units[value.unit];
  if (into.unit != value.unit || into.used_up || IsLong(plan_, unit.shard_communicator)) return false;
  const double ranks = IsLong(plan_, unit.replicate_communicator)
                           ? static_cast<double>(plan_.communicators[unit.replicate_communicator].size)
                           : 1.0;
  return into.replicated && Near(into.divisor, ranks) && !value.replicated && Near(value.divisor, 1.0);
}

void Gradients::Accumulate(Gradient& into, const Gradient& value, BufferId dst, Position at) {
  if (AddsToAverage(into, value)) {
    into.replicated = false;
    into.divisor = 1.0;
    into.checked = false;
  }
  if (GradNotReducedAlike(into, value)) {
    words_.AddedToUnlike(value, dst, at);
    into = value;
    return;
  }
  SHARDPLAN_ASSERT(into.count.size() == value.count.size(),
                   "gradients of one unit count the same parameters");
  if (GradDivisionOfSum(into, value)) words_.AddedToDividedUnlike(into, value, dst, at);
  for (const std::int32_t p : ReadBeforeWriteOfSum(plan_, into, value, plan_.buffers[dst].role)) {
    words_.GradientNotMade(into, p, dst, at);
  }
  for (std::size_t p = 0; p < into.count.size(); ++p) {
    into.count[p] += value.count[p];
    into.zero[p] = static_cast<char>(into.zero[p] | value.zero[p]);
    if (value.Has(p)) into.stepped[p] = 0;
  }
  into.history.push_back(at);
}

void Gradients::Move(const Instruction& instruction, Position at) {
  At(instruction.src);  // first: looking one up may grow values_
  At(instruction.dst);
  Gradient& source = At(instruction.src);
  Gradient& target = At(instruction.dst);
  if (source.unit < 0) {  // no gradient to follow: either it is none, or memory has said what is wrong
    target = {};
    return;
  }
  Gradient value = Select(source, instruction, at);
  if (instruction.kind == InstructionKind::kReduceScatter) Reduce(value, instruction, at);
  value.history.push_back(at);
  if (instruction.kind == InstructionKind::kGradAccumulate && target.unit >= 0) {
    return Accumulate(target, value, instruction.dst, at);
  }
  const bool copies =
      instruction.kind == InstructionKind::kGradCopyIn || instruction.kind == InstructionKind::kGradCast;
  if (copies && JoinOther(target, value)) return;
  if (GradNotReducedButLost(target)) words_.Overwritten(target, instruction.dst, at);
  target = std::move(value);
}

void Gradients::Change(const Instruction& instruction, Position at) {
  Gradient& value = At(instruction.src);
  if (value.unit < 0) return;
  if (GradNotReducedButMoved(value)) words_.ChangedAfterMove(value, instruction.src, at);
  value.checked = false;
  if (instruction.kind == InstructionKind::kGradScale) {
    value.divisor *= instruction.divisor;
  } else {
    Reduce(value, instruction, at);
  }
  value.history.push_back(at);
}

void Gradients::Release(BufferId buffer, Position at) {
  if (!IsFinalGradient(plan_.buffers[buffer].role)) return;
  Consume(buffer, at);
  Gradient& value = At(buffer);
  if (steps_ && value.IsThere()) {
    const UnitId unit = plan_.buffers[buffer].unit;
    for (const std::int32_t p : OptimizerStepOfDropped(value)) {
      // A frozen part of a flat parameter has a gradient, as all of that has; nobody wants it.
      if (plan_.units[unit].parameters[p].requires_grad) words_.DroppedBeforeStep(value, p, buffer, at);
    }
  }
  value.used_up = true;
}

std::vector<std::int32_t> Gradients::Step(BufferId buffer, const std::vector<std::int32_t>& parameters,
                                          Position at) {
  Gradient& value = At(buffer);
  std::vector<std::int32_t> stepped;
  if (!value.IsThere()) return stepped;
  for (const std::int32_t p : parameters) {
    if (!value.Has(static_cast<std::size_t>(p))) continue;
    if (OptimizerStepTwice(value, p) && !may_step_again_) words_.SteppedTwice(value, p, buffer, at);
    value.stepped[p] = 1;
    stepped.push_back(p);
  }
  return stepped;
}

void Gradients::Drop(std::int32_t slot, BufferId buffer, Position at) {
  if (static_cast<std::size_t>(slot) >= values_.size()) return;
  Gradient& value = values_[slot];
  if (GradNotReducedButLost(value)) words_.Dropped(value, buffer, at);
  value = {};
}

void Gradients::Consume(BufferId buffer, Position at) {
  Gradient& value = At(buffer);
  if (value.IsThere()) CheckReduced(value, buffer, at);
}

void Gradients::CheckReduced(Gradient& value, BufferId buffer, Position at) {
  if (value.checked) return;
  value.checked = true;
  const MissingReduction missing = GradNotReduced(plan_, value);
  if (missing != MissingReduction::kNone) return words_.NotReduced(value, missing, buffer, at);
  if (!GradDivision(plan_, value)) return;
  words_.DividedWrongly(value, ExpectedDivisor(plan_, plan_.units[value.unit]), buffer, at);
}

void Gradients::CheckNoneUnreduced(UnitId unit, Position at) {
  std::vector<char> is_final(values_.size(), false);  // by slot: has (also) the name of a final gradient
  const auto for_each_value = [&](auto&& visit) {
    for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
      const BufferId buffer = static_cast<BufferId>(i);
      if (!memory_.IsAlive(buffer)) continue;
      const std::size_t slot = memory_.Slot(buffer);
      if (slot < values_.size() && values_[slot].IsThere()) visit(buffer, slot);
    }
  };
  for_each_value([&](BufferId buffer, std::size_t slot) {
    if (IsFinalGradient(plan_.buffers[buffer].role)) is_final[slot] = true;
  });
  for_each_value([&](BufferId buffer, std::size_t slot) {
    const Gradient& value = values_[slot];
    if (is_final[slot] || (unit >= 0 && value.unit != unit)) return;
    words_.StillOnItsWay(value, buffer, at);
  });
}

bool Gradients::IsUsedUp(BufferId buffer) const {
  const std::size_t slot = memory_.Slot(buffer);
  return slot < values_.size() && values_[slot].used_up;
}

std::vector<std::int32_t> Gradients::Contributions(BufferId buffer) const {
  if (!memory_.IsAlive(buffer)) return {};
  const std::size_t slot = memory_.Slot(buffer);
  if (slot >= values_.size() || !values_[slot].IsThere()) return {};
  std::vector<std::int32_t> contributions = values_[slot].count;
  for (std::size_t p = 0; p < contributions.size(); ++p) {
    if (contributions[p] == 0 && values_[slot].zero[p] != 0) contributions[p] = -1;
  }
  return contributions;
}

}  // namespace shardplan::verifier
