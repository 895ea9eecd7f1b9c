// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <set>
#include <vector>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {
namespace {

bool IsUnreduced(const Plan& plan, const MemoryBlock& block) {
  if (block.buffer < 0) return false;
  const BufferRole role = plan.buffers[static_cast<std::size_t>(block.buffer)].role;
  switch (DescriptionOf(role).reduction) {
    case RoleReduction::kUnreduced:
    case RoleReduction::kInner:
    case RoleReduction::kPartial:
      return true;
    case RoleReduction::kNone:
    case RoleReduction::kInput:
    case RoleReduction::kReduced:
      return false;
  }
  return false;
}

// The ends of backwards, counted from the first step on.
class BackwardEnds {
 public:
  explicit BackwardEnds(const Plan& plan) {
    for (const PlanStep& step : plan.steps) {
      before_.emplace_back(1, 0);
      for (const Trigger& trigger : step.triggers) {
        before_.back().push_back(before_.back().back() + (trigger.kind == TriggerKind::kBackwardEnd ? 1 : 0));
      }
    }
  }
  std::int64_t InStep(std::int32_t step) const { return before_[static_cast<std::size_t>(step)].back(); }
  // The number of them in the step, before the trigger in which the point is.
  std::int64_t Before(const MemoryPoint& at) const {
    const std::vector<std::int64_t>& before = before_[static_cast<std::size_t>(at.step)];
    return before[static_cast<std::size_t>(
        std::clamp<std::int64_t>(at.trigger, 0, static_cast<std::int64_t>(before.size()) - 1))];
  }

 private:
  std::vector<std::vector<std::int64_t>> before_;  // by step and trigger
};

// By block: is it alive, and unreduced, where a backward ends?
std::vector<bool> Waiting(const Plan& plan, const MemoryHistory& history) {
  const BackwardEnds ends(plan);
  std::vector<bool> waits(history.blocks.size(), false);
  std::set<std::int32_t> alive;
  MemoryPoint last;  // of no step
  for (const MemoryAction& action : history.actions) {
    const MemoryPoint& at = action.at;
    if (at.step >= 0) {
      const bool same = last.step == at.step && last.trigger <= at.trigger;
      const std::int64_t passed = same ? ends.Before(at) - ends.Before(last)
                                  : last.step < 0
                                      ? 0
                                      : ends.InStep(last.step) - ends.Before(last) + ends.Before(at);
      if (passed > 0) {
        for (const std::int32_t block : alive) waits[static_cast<std::size_t>(block)] = true;
      }
      last = at;
    }
    if (!IsUnreduced(plan, history.blocks[static_cast<std::size_t>(action.block)])) continue;
    action.frees ? (void)alive.erase(action.block) : (void)alive.insert(action.block);
  }
  for (const std::int32_t block : alive) waits[static_cast<std::size_t>(block)] = true;  // of a later step
  return waits;
}

// A step with one backward that reduces all it makes defers nothing, as the walk would find.
bool MayDefer(const Plan& plan) {
  return plan.steps.size() > 1 || std::ranges::any_of(plan.steps, [](const PlanStep& step) {
           return std::ranges::count(step.triggers, TriggerKind::kBackwardEnd, &Trigger::kind) > 1;
         });
}

}  // namespace

DeferredGradients DeferredGradientsOf(const Plan& plan, std::int32_t step) {
  return MayDefer(plan) ? DeferredGradientsOf(plan, MemoryHistoryOf(plan, {}), step) : DeferredGradients{};
}

DeferredGradients DeferredGradientsOf(const Plan& plan, const MemoryHistory& history, std::int32_t step) {
  const std::vector<bool> waits = Waiting(plan, history);
  DeferredGradients result;
  std::int64_t bytes = 0;
  std::multiset<UnitId> units;
  for (std::size_t a = 0; a < history.actions.size(); ++a) {
    const MemoryAction& action = history.actions[a];
    const auto number = static_cast<std::size_t>(action.block);
    if (waits[number]) {
      const MemoryBlock& block = history.blocks[number];
      const std::int64_t rounded = (block.requested_bytes.value + 511) / 512 * 512;
      bytes += action.frees ? -rounded : rounded;
      if (action.frees) {
        units.erase(units.find(block.unit));
      } else {
        units.insert(block.unit);
      }
    }
    if (a < history.first_recorded || action.at.step != step || bytes <= result.peak_bytes.value) continue;
    const std::set<UnitId> different(units.begin(), units.end());
    result = {
        .peak_bytes = Bytes{bytes}, .units = static_cast<std::int32_t>(different.size()), .at = action.at};
  }
  return result;
}

}  // namespace shardplan
