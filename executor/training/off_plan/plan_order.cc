// SPDX-License-Identifier: Apache-2.0
#include "training/off_plan/plan_order.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <variant>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {
namespace {

// [begin, end] of every forward of a step: from the first unit entered to where that one is left.
struct Forward {
  std::size_t begin;
  std::size_t end;
};

std::vector<Forward> ForwardsOf(const std::vector<Trigger>& triggers) {
  std::vector<Forward> forwards;
  for (std::size_t i = 0; i < triggers.size(); ++i) {
    if (triggers[i].kind != TriggerKind::kPreForward) continue;
    const auto leaves = [&](const Trigger& t) {
      return t.kind == TriggerKind::kPostForward && t.unit == triggers[i].unit;
    };
    const auto begin = triggers.begin() + static_cast<std::ptrdiff_t>(i);
    const auto end = std::find_if(begin, triggers.end(), leaves);
    const auto last = static_cast<std::size_t>(end - triggers.begin()) - (end == triggers.end() ? 1 : 0);
    forwards.push_back({i, last});
    i = last;
  }
  return forwards;
}

// The backward of a micro-batch belongs to its latest forward.
bool HasBackward(const std::vector<Trigger>& triggers, const Forward& forward) {
  const std::int32_t microbatch = triggers[forward.begin].microbatch;
  for (std::size_t i = forward.end + 1; i < triggers.size(); ++i) {
    if (triggers[i].microbatch != microbatch) continue;
    if (triggers[i].kind == TriggerKind::kPreBackward) return true;
    if (triggers[i].kind == TriggerKind::kPreForward) return false;
  }
  return false;
}

// By step of the plan: are its backwards, in order, last ones? The strategy's program sets it. Steps after
// the program's are like its last one.
std::vector<std::vector<bool>> LastBackwards(const Plan& plan) {
  bool last = true;
  const auto note = [&](const ModuleCall& call) {
    if (call.method == "set_is_last_backward") last = call.value.value_or(true);
  };
  for (const ModuleCall& call : plan.strategy.setup) note(call);
  const std::vector<StepProgram>& program = plan.strategy.program;
  std::vector<std::vector<bool>> steps(plan.steps.size());
  for (std::size_t s = 0; s < steps.size() && !program.empty(); ++s) {
    for (const ProgramCall& call : program[std::min(s, program.size() - 1)]) {
      if (const auto* of_module = std::get_if<ModuleCall>(&call)) note(*of_module);
      if (std::holds_alternative<BackwardCall>(call)) steps[s].push_back(last);
    }
  }
  if (!last && program.empty()) steps.assign(steps.size(), {false});
  return steps;
}

// By trigger of a step: no gradient is reduced from the last backward_end, or the step's begin, to the next.
std::vector<bool> KeepsOf(const Plan& plan, const std::vector<Trigger>& triggers) {
  const auto reduces = [&](const Instruction& i) {
    if (i.dst < 0) return false;
    const BufferRole role = plan.buffers[i.dst].role;
    return i.kind != InstructionKind::kAllocate && (IsFinalGradient(role) || IsPartlyReduced(role));
  };
  std::vector<bool> keeps(triggers.size(), false);
  bool reduced = false;
  std::size_t begin = 0;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    reduced = reduced || std::ranges::any_of(triggers[t].instructions, reduces);
    if (triggers[t].kind != TriggerKind::kBackwardEnd) continue;
    for (; begin <= t; ++begin) keeps[begin] = !reduced;
    reduced = false;
  }
  return keeps;
}

// By trigger of a step: the units that the backward makes gradients of, and whether it reduces them.
std::vector<std::shared_ptr<const std::vector<UnitGradients>>> GradientsOf(
    const Plan& plan, const std::vector<Trigger>& triggers) {
  std::vector<std::shared_ptr<const std::vector<UnitGradients>>> result(triggers.size());
  std::vector<UnitGradients> units(plan.units.size(), UnitGradients::kNone);
  std::size_t begin = 0;
  // If the user finalizes the backward, the remaining gradients are reduced then.
  const bool finalized = std::ranges::any_of(triggers, [&](const Trigger& trigger) {
    return trigger.kind == TriggerKind::kUserCall &&
           std::ranges::any_of(trigger.instructions, [&](const Instruction& i) {
             return i.dst >= 0 && i.kind != InstructionKind::kAllocate &&
                    IsFinalGradient(plan.buffers[i.dst].role);
           });
  });
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (const Instruction& i : triggers[t].instructions) {
      if (i.kind == InstructionKind::kCompute) {
        for (const SegmentGrad& grad : plan.segments[i.segment].grads) {
          if (units[grad.unit] == UnitGradients::kNone) units[grad.unit] = UnitGradients::kKept;
        }
      } else if (i.kind != InstructionKind::kAllocate && i.dst >= 0) {
        const Buffer& buffer = plan.buffers[i.dst];
        // A backward that the user finalizes has its gradients reduced, and handed over behind it.
        if (ReducesGradients(i.kind) || IsFinalGradient(buffer.role) || IsPartlyReduced(buffer.role))
          units[buffer.unit] = UnitGradients::kReduced;
      }
    }
    if (triggers[t].kind != TriggerKind::kBackwardEnd) continue;
    if (finalized) std::ranges::replace(units, UnitGradients::kKept, UnitGradients::kNone);
    const auto shared = std::make_shared<const std::vector<UnitGradients>>(std::move(units));
    for (; begin <= t; ++begin) result[begin] = shared;
    units.assign(plan.units.size(), UnitGradients::kNone);
  }
  return result;
}

std::vector<BufferId> TakenAt(const Plan& plan, const Trigger& trigger) {
  std::vector<BufferId> taken;
  for (const Instruction& i : trigger.instructions) {
    const InstructionDescription& is = DescriptionOf(i.kind);
    const bool takes = is.value == ValueEffect::kReduces && is.family == InstructionFamily::kCopy &&
                       plan.buffers[i.src].role == BufferRole::kGradUnsharded;
    if (takes) taken.push_back(i.src);
  }
  return taken;
}

}  // namespace

bool PassedSilently(TriggerKind kind) {
  switch (kind) {
    case TriggerKind::kStepBegin:
    case TriggerKind::kLazyInit:
    case TriggerKind::kOptimizerStep:
    case TriggerKind::kZeroGrad:
    case TriggerKind::kUserCall:
    case TriggerKind::kStepEnd:
      return true;
    default:
      return false;
  }
}

namespace {

using Taken = std::vector<std::vector<BufferId>>;  // by trigger
using OfUnits = std::set<std::pair<UnitId, std::int32_t>>;

void Add(const Plan& plan, const std::vector<BufferId>& buffers, OfUnits& parameters) {
  for (const BufferId buffer : buffers) {
    for (const std::int32_t p : ParametersOf(plan, plan.buffers[buffer]))
      parameters.insert({plan.buffers[buffer].unit, p});
  }
}

// See GradientsLeftAt. Other steps may take what one keeps.
std::vector<std::vector<SegmentGrad>> LeftOf(const Plan& plan, const std::vector<Taken>& taken,
                                             std::size_t step) {
  OfUnits later;
  for (std::size_t s = 0; s < taken.size(); ++s) {
    for (const std::vector<BufferId>& buffers : taken[s]) {
      if (s != step) Add(plan, buffers, later);
    }
  }
  std::vector<std::vector<SegmentGrad>> left(taken[step].size());
  for (std::size_t t = left.size(); t-- > 0;) {
    Add(plan, taken[step][t], later);
    std::set<UnitId> units;
    for (const BufferId buffer : taken[step][t]) units.insert(plan.buffers[buffer].unit);
    for (const UnitId unit : units) {
      const std::vector<UnitParameter>& parameters = plan.units[unit].parameters;
      if (plan.units[unit].layout == LayoutKind::kFlat) continue;
      for (std::int32_t p = 0; p < std::ssize(parameters); ++p) {
        if (parameters[p].requires_grad && !later.contains({unit, p})) left[t].push_back({unit, p});
      }
    }
  }
  return left;
}

}  // namespace

PlanOrder::PlanOrder(const Plan& plan) : plan_(plan) {
  for (const PlanStep& step : plan.steps) {
    std::vector<std::vector<BufferId>>& taken = taken_.emplace_back();
    for (const Trigger& trigger : step.triggers) taken.push_back(TakenAt(plan, trigger));
    keeps_.push_back(KeepsOf(plan, step.triggers));
    gradients_.push_back(GradientsOf(plan, step.triggers));
    std::vector<bool>& without = no_backward_.emplace_back(step.triggers.size(), false);
    for (const Forward& forward : ForwardsOf(step.triggers)) {
      if (HasBackward(step.triggers, forward)) continue;
      for (std::size_t i = forward.begin; i <= forward.end; ++i) without[i] = true;
    }
  }
  for (std::size_t s = 0; s < plan.steps.size(); ++s) left_.push_back(LeftOf(plan, taken_, s));
  const std::vector<std::vector<bool>> last = LastBackwards(plan);
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const std::vector<Trigger>& triggers = plan.steps[s].triggers;
    std::vector<bool>& is_last = last_backward_.emplace_back(triggers.size(), true);
    std::size_t backward = 0;
    for (std::size_t i = 0; i < triggers.size(); ++i) {
      if (triggers[i].kind != TriggerKind::kBackwardEnd || backward >= last[s].size()) continue;
      is_last[i] = last[s][backward++];
    }
  }
}

PlanPosition PlanOrder::After(PlanPosition position) const {
  if (position.trigger + 1 < std::ssize(plan_.steps[position.step].triggers)) {
    return {position.step, position.trigger + 1};
  }
  const bool last = position.step + 1 == std::ssize(plan_.steps);
  return {last ? plan_.steady_step : position.step + 1, 0};
}

PlanPosition PlanOrder::NextHooked(PlanPosition position) const {
  // A step without any hook's trigger would never end this; two rounds are enough to know.
  std::size_t limit = 0;
  for (const PlanStep& step : plan_.steps) limit += 2 * step.triggers.size();
  while (PassedSilently(At(position).kind) && limit-- > 0) position = After(position);
  return position;
}

template <typename Wanted>
std::optional<PlanPosition> PlanOrder::FindUserCall(PlanPosition position, const Wanted& wanted) const {
  const PlanPosition end = NextHooked(position);
  for (; position.step != end.step || position.trigger != end.trigger; position = After(position)) {
    if (At(position).kind == TriggerKind::kUserCall && wanted(position)) return position;
  }
  return std::nullopt;
}

std::optional<PlanPosition> PlanOrder::NextUserCall(PlanPosition position, UnitId unit) const {
  return FindUserCall(position,
                      [&](PlanPosition at) { return At(at).unit == unit && !At(at).instructions.empty(); });
}

bool PlanOrder::NextUserCallsTakeGradients(PlanPosition position) const {
  return FindUserCall(position, [&](PlanPosition at) { return !GradientsTakenAt(at).empty(); }).has_value();
}

}  // namespace shardplan::executor
