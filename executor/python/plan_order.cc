#include "plan_order.h"

#include <algorithm>
#include <cstddef>

namespace shardplan::python {
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

}  // namespace

bool PassedSilently(TriggerKind kind) {
  switch (kind) {
    case TriggerKind::kStepBegin:
    case TriggerKind::kOptimizerStep:
    case TriggerKind::kZeroGrad:
    case TriggerKind::kUserCall:
    case TriggerKind::kStepEnd:
      return true;
    default:
      return false;
  }
}

PlanOrder::PlanOrder(const Plan& plan) : plan_(plan) {
  for (const PlanStep& step : plan.steps) {
    std::vector<bool>& without = no_backward_.emplace_back(step.triggers.size(), false);
    for (const Forward& forward : ForwardsOf(step.triggers)) {
      if (HasBackward(step.triggers, forward)) continue;
      for (std::size_t i = forward.begin; i <= forward.end; ++i) without[i] = true;
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

std::optional<PlanPosition> PlanOrder::NextUserCall(PlanPosition position, UnitId unit) const {
  const PlanPosition end = NextHooked(position);
  for (; position.step != end.step || position.trigger != end.trigger; position = After(position)) {
    const Trigger& trigger = At(position);
    const bool found =
        trigger.kind == TriggerKind::kUserCall && trigger.unit == unit && !trigger.instructions.empty();
    if (found) return position;
  }
  return std::nullopt;
}

}  // namespace shardplan::python
