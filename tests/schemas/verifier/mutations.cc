// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/verifier/mutations.h"

#include <algorithm>
#include <utility>

namespace shardplan::test {
namespace {

std::vector<Instruction>& TriggerAt(Plan& plan, Spot spot) {
  return plan.steps[spot.step].triggers[spot.trigger].instructions.Edit();
}

std::string Text(const Plan& plan, Spot spot) {
  const Instruction& i = InstructionAt(plan, spot);
  std::string text(Name(i.kind));
  for (const BufferId buffer : {i.src, i.dst}) {
    if (buffer >= 0) text += " " + plan.buffers[buffer].name;
  }
  if (i.event >= 0) text += " " + plan.events[i.event];
  return text + " (step " + std::to_string(spot.step) + ", trigger " + std::to_string(spot.trigger) +
         ", instruction " + std::to_string(spot.instruction) + ")";
}

}  // namespace

std::vector<Spot> AllSpots(const Plan& plan) {
  std::vector<Spot> spots;
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    for (std::size_t t = 0; t < plan.steps[s].triggers.size(); ++t) {
      for (std::size_t i = 0; i < plan.steps[s].triggers[t].instructions.size(); ++i)
        spots.push_back({s, t, i});
    }
  }
  return spots;
}

Instruction& InstructionAt(Plan& plan, Spot spot) { return TriggerAt(plan, spot)[spot.instruction]; }
const Instruction& InstructionAt(const Plan& plan, Spot spot) {
  return plan.steps[spot.step].triggers[spot.trigger].instructions[spot.instruction];
}

std::vector<Spot> SpotsOf(const Plan& plan, InstructionKind kind) {
  std::vector<Spot> spots = AllSpots(plan);
  std::erase_if(spots, [&](Spot spot) { return InstructionAt(plan, spot).kind != kind; });
  return spots;
}

Plan Without(Plan plan, Spot spot) {
  std::vector<Instruction>& list = TriggerAt(plan, spot);
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(spot.instruction));
  return plan;
}

Plan Swapped(Plan plan, Spot spot) {
  std::vector<Instruction>& list = TriggerAt(plan, spot);
  if (spot.instruction + 1 < list.size()) std::swap(list[spot.instruction], list[spot.instruction + 1]);
  return plan;
}

Plan Doubled(Plan plan, Spot spot) {
  std::vector<Instruction>& list = TriggerAt(plan, spot);
  const Instruction copy = list[spot.instruction];
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(spot.instruction), copy);
  return plan;
}

Plan RandomChange(Plan plan, std::mt19937_64& random, std::string& what) {
  const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const std::vector<Spot> spots = AllSpots(plan);
  const Spot spot = spots[pick(spots.size())];
  Instruction& i = InstructionAt(plan, spot);
  const std::string text = Text(plan, spot);
  switch (pick(6)) {
    case 0:
      what = "without " + text;
      return Without(std::move(plan), spot);
    case 1:
      what = "twice " + text;
      return Doubled(std::move(plan), spot);
    case 2:
      what = "swapped with the next " + text;
      return Swapped(std::move(plan), spot);
    case 3: {  // up to eight places away, over trigger borders
      const std::size_t from =
          static_cast<std::size_t>(std::ranges::find_if(spots,
                                                        [&](Spot s) {
                                                          return s.step == spot.step &&
                                                                 s.trigger == spot.trigger &&
                                                                 s.instruction == spot.instruction;
                                                        }) -
                                   spots.begin());
      const std::size_t low = from < 8 ? 0 : from - 8;
      const Spot to = spots[low + pick(std::min(spots.size() - low, std::size_t{17}))];
      if (to.step != spot.step || to.trigger == spot.trigger) break;
      const Instruction moved = i;
      plan = Without(std::move(plan), spot);
      std::vector<Instruction>& list = TriggerAt(plan, to);
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(to.instruction), moved);
      what = "moved to trigger " + std::to_string(to.trigger) + ", " + text;
      return plan;
    }
    case 4:
      if (i.stream >= 0) {
        i.stream = static_cast<StreamId>(pick(plan.streams.size()));
        what = "on stream " + plan.streams[i.stream].name + ", " + text;
        return plan;
      }
      break;
    default:
      if (i.kind == InstructionKind::kWait) {
        i.event = static_cast<EventId>(pick(plan.events.size()));
        what = "for event " + plan.events[i.event] + ", " + text;
        return plan;
      }
      if (i.kind == InstructionKind::kFree && pick(2) == 0) {
        i.parts = {0};
        what = "of a part only, " + text;
        return plan;
      }
      if (i.kind == InstructionKind::kFree) {
        const StreamId stream = static_cast<StreamId>(pick(plan.streams.size()));
        std::vector<StreamId>& safe_after = i.safe_after.Edit();
        if (std::erase(safe_after, stream) == 0) safe_after.push_back(stream);
        what = "safe after changed by " + plan.streams[stream].name + ", " + text;
        return plan;
      }
      break;
  }
  what = "unchanged";
  return plan;
}

}  // namespace shardplan::test
