// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "memory/categories.h"
#include "memory/knobs.h"
#include "shardplan/simulator/memory_explanation.h"

namespace shardplan {
namespace {

bool Before(const MemoryPoint& a, const MemoryPoint& b) {
  return std::tie(a.step, a.trigger, a.instruction, a.entry) <
         std::tie(b.step, b.trigger, b.instruction, b.entry);
}

class Explainer {
 public:
  Explainer(const Plan& plan, const MemoryHistory& history, Bytes granularity_bytes)
      : plan_(plan), history_(history), granularity_(std::max<std::int64_t>(1, granularity_bytes.value)) {
    const auto last = static_cast<std::int32_t>(plan.steps.size()) - 1;
    steady_ = plan.steps.size() == 1 ? 0 : std::clamp(plan.steady_step, 0, std::max(last, 0));
  }

  MemoryExplanation Explain() {
    FindPeak();
    if (peak_action_ < 0) return std::move(result_);
    const MemoryAction& action = history_.actions[static_cast<std::size_t>(peak_action_)];
    result_.peak_bytes.value = peak_;
    result_.peak_at = action.at;
    result_.peak_action = peak_action_;
    result_.peak_text = PointText(plan_, action.at);
    result_.allocation = BlockName(plan_, history_, action.block);
    FindUsed();
    CollectAlive();
    MeasureUnits();
    return std::move(result_);
  }

 private:
  std::int64_t RoundedBytes(const MemoryBlock& block) const {
    return (block.requested_bytes.value + granularity_ - 1) / granularity_ * granularity_;
  }
  bool InSteadyStep(std::size_t a) const {
    return a >= history_.first_recorded && history_.actions[a].at.step == steady_;
  }

  void FindPeak() {
    std::int64_t total = 0;
    for (std::size_t a = 0; a < history_.actions.size(); ++a) {
      const MemoryAction& action = history_.actions[a];
      const std::int64_t bytes = RoundedBytes(history_.blocks[static_cast<std::size_t>(action.block)]);
      total += action.frees ? -bytes : bytes;
      if (action.frees || total <= peak_ || !InSteadyStep(a)) continue;
      peak_ = total;
      peak_action_ = static_cast<std::int32_t>(a);
    }
  }

  // Units whose parameters the instruction at the peak needs.
  void FindUsed() {
    const MemoryPoint& at = result_.peak_at;
    const auto& triggers = plan_.steps[static_cast<std::size_t>(at.step)].triggers;
    if (at.trigger < 0 || static_cast<std::size_t>(at.trigger) >= triggers.size()) return;
    const Trigger& trigger = triggers[static_cast<std::size_t>(at.trigger)];
    const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(at.instruction)];
    if (instruction.kind == InstructionKind::kCompute && instruction.segment >= 0) {
      const Segment& segment = plan_.segments[static_cast<std::size_t>(instruction.segment)];
      used_.insert(segment.reads.begin(), segment.reads.end());
    } else if (instruction.unit >= 0) {
      used_.insert(instruction.unit);
    }
  }

  bool AliveAtPeak(const MemoryBlock& block) const {
    return block.born <= peak_action_ && (block.died < 0 || block.died > peak_action_);
  }

  void CollectAlive() {
    std::map<std::tuple<std::int32_t, UnitId, BufferId>, std::size_t> index;
    std::vector<std::int64_t> largest;
    for (std::size_t b = 0; b < history_.blocks.size(); ++b) {
      const MemoryBlock& block = history_.blocks[b];
      const std::int64_t bytes = RoundedBytes(block);
      if (!AliveAtPeak(block) || bytes == 0) continue;
      const auto [found, added] =
          index.try_emplace({block.category, block.unit, block.buffer}, result_.alive.size());
      const MemoryPoint born = history_.actions[static_cast<std::size_t>(block.born)].at;
      const MemoryPoint died =
          block.died < 0 ? MemoryPoint{} : history_.actions[static_cast<std::size_t>(block.died)].at;
      if (added) {
        result_.alive.push_back({.category = MemoryCategories()[static_cast<std::size_t>(block.category)],
                                 .unit = block.unit,
                                 .since = born,
                                 .until = died,
                                 .in_use = used_.contains(block.unit)});
        largest.push_back(-1);
      }
      AliveMemory& alive = result_.alive[found->second];
      alive.bytes.value += bytes;
      ++alive.blocks;
      if (Before(born, alive.since)) alive.since = born;
      if (block.died < 0 || (alive.until.step >= 0 && Before(alive.until, died))) alive.until = died;
      if (bytes > largest[found->second]) {
        largest[found->second] = bytes;
        alive.name = block.buffer >= 0 ? plan_.buffers[static_cast<std::size_t>(block.buffer)].name
                                       : BlockName(plan_, history_, static_cast<std::int32_t>(b));
      }
    }
    for (AliveMemory& alive : result_.alive) {
      if (alive.blocks > 1) alive.name += fmt::format(" and {} more", alive.blocks - 1);
      internal::AdviseKnob(plan_, alive);
    }
    std::ranges::stable_sort(result_.alive,
                             [](const AliveMemory& a, const AliveMemory& b) { return a.bytes > b.bytes; });
  }

  void MeasureUnits() {
    const std::size_t none = plan_.units.size();
    std::vector<std::int64_t> now(none + 1);
    result_.units.resize(none + 1);
    for (std::size_t u = 0; u < none; ++u) result_.units[u].unit = static_cast<UnitId>(u);
    for (std::size_t a = 0; a < history_.actions.size(); ++a) {
      const MemoryAction& action = history_.actions[a];
      const MemoryBlock& block = history_.blocks[static_cast<std::size_t>(action.block)];
      const std::size_t u = block.unit < 0 ? none : static_cast<std::size_t>(block.unit);
      now[u] += action.frees ? -RoundedBytes(block) : RoundedBytes(block);
      UnitMemory& unit = result_.units[u];
      if (InSteadyStep(a) && now[u] > unit.highest_bytes.value) {
        unit.highest_bytes.value = now[u];
        unit.highest_at = action.at;
      }
      if (static_cast<std::int32_t>(a) != peak_action_) continue;
      for (std::size_t i = 0; i <= none; ++i) result_.units[i].at_peak_bytes.value = now[i];
    }
    // A unit that only has what was there before the step.
    for (std::size_t i = 0; i <= none; ++i) {
      UnitMemory& unit = result_.units[i];
      if (unit.highest_bytes >= unit.at_peak_bytes) continue;
      unit.highest_bytes = unit.at_peak_bytes;
      unit.highest_at = result_.peak_at;
    }
  }

  const Plan& plan_;
  const MemoryHistory& history_;
  const std::int64_t granularity_;
  std::int32_t steady_ = 0;
  std::int64_t peak_ = 0;
  std::int32_t peak_action_ = -1;
  std::set<UnitId> used_;
  MemoryExplanation result_;
};

}  // namespace

MemoryExplanation ExplainMemory(const Plan& plan, const MemoryHistory& history, Bytes granularity_bytes) {
  if (plan.steps.empty()) return {};
  return Explainer(plan, history, granularity_bytes).Explain();
}

}  // namespace shardplan
