// SPDX-License-Identifier: Apache-2.0
#include "verifier/rules.h"

#include <algorithm>

#include "shardplan/schemas/layout.h"
#include "verifier/layout.h"

namespace shardplan::verifier {

bool UseUnallocated(const Lifetime& buffer, std::int32_t step) {
  return buffer.slot < 0 && buffer.freed_step != step;
}

bool UseAfterFree(const Lifetime& buffer, std::int32_t step) {
  return buffer.slot < 0 && buffer.freed_step == step;
}

bool UseAfterFreeOfParts(const Plan& plan, const Allocation& memory, BufferId buffer, BufferId other) {
  if (memory.freed_parts.empty()) return false;
  const std::vector<std::int32_t>& held = plan.buffers[buffer].parameters;
  const bool by_parameter =
      other >= 0 && memory.owner == buffer && held.size() == plan.buffers[buffer].parts_bytes.size();
  if (!by_parameter) return true;
  const std::vector<std::int32_t>& wanted = plan.buffers[other].parameters;
  return wanted.empty() || std::ranges::any_of(memory.freed_parts, [&](std::int32_t part) {
           return std::ranges::binary_search(wanted, held[part]);
         });
}

UnitId UseAfterFreeOfBound(const Plan& plan, const std::vector<BufferId>& bound, BufferId freed) {
  const UnitId unit = plan.buffers[freed].unit;
  if (unit >= 0) return bound[unit] == freed ? unit : -1;
  const auto found = std::ranges::find(bound, freed);  // a buffer of no unit may be bound to any
  return found == bound.end() ? -1 : static_cast<UnitId>(found - bound.begin());
}

bool DoubleFree(const Lifetime& buffer, std::int32_t step) {
  return buffer.slot < 0 && buffer.freed_step == step;
}

std::vector<std::int32_t> DoubleFreeOfParts(const Allocation& memory,
                                            const std::vector<std::int32_t>& parts) {
  std::vector<std::int32_t> twice;
  for (const std::int32_t part : parts) {
    if (std::ranges::find(memory.freed_parts, part) != memory.freed_parts.end()) twice.push_back(part);
  }
  return twice;
}

bool DoubleAllocate(const Lifetime& buffer) { return buffer.slot >= 0; }

ReadFault ReadBeforeWrite(const Allocation& memory, Content needed, const Work& reader,
                          const Clocks& clocks) {
  if (memory.content < needed) return ReadFault::kTooLittle;
  return clocks.IsBefore(memory.last_write, reader.stream) ? ReadFault::kHolds : ReadFault::kNotOrdered;
}

std::vector<Work> WriteRace(const Allocation& memory, const Work& writer, const Clocks& clocks) {
  std::vector<Work> unordered;
  for (const Work& use : memory.last_access) {
    if (!clocks.IsBefore(use, writer.stream)) unordered.push_back(use);
  }
  return unordered;
}

std::vector<Debt> FreeBeforeLastUse(const std::vector<Debt>& pool, const Work& first_use,
                                    const Clocks& clocks) {
  std::vector<Debt> unordered;
  for (const Debt& debt : pool) {
    if (!clocks.IsBefore(debt.use, first_use.stream)) unordered.push_back(debt);
  }
  return unordered;
}

bool UseBeforeUnshard(const std::vector<BufferId>& bound, UnitId unit) { return bound[unit] < 0; }

bool WrongValueOfPieces(const Plan& plan, const Allocation& memory, CommunicatorId gathers) {
  return IsLong(plan, gathers) && !SameGroups(plan, memory.cut_over, gathers);
}

bool WrongValueOfOutdated(const Plan& plan, const Allocation& memory, BufferId to) {
  if (memory.outdated.empty()) return false;
  const std::vector<std::int32_t> moved = ParametersOf(plan, plan.buffers[to]);
  return std::ranges::any_of(
      moved, [&](std::int32_t p) { return std::ranges::find(memory.outdated, p) != memory.outdated.end(); });
}

bool WrongValueOfBound(const Plan& plan, UnitId unit, BufferId bound) {
  const Buffer& buffer = plan.buffers[bound];
  if (buffer.unit != unit) return true;
  const Unit& of = plan.units[unit];
  if (!buffer.parameters.empty() && buffer.parameters.size() < of.parameters.size()) return true;
  const bool one_after_the_other = of.layout == LayoutKind::kFlat && buffer.role != BufferRole::kParamSharded;
  return ArrangementOf(buffer.role) != Arrangement::kWhole && !one_after_the_other &&
         ShardCount(plan, of) > 1;
}

bool WrongValueOfDType(const Plan& plan, UnitId unit, BufferId bound, bool evaluates) {
  const Unit& of = plan.units[unit];
  const DType dtype = plan.buffers[bound].dtype;
  if (of.layout != LayoutKind::kFlat || plan.buffers[bound].role == BufferRole::kParamSharded) return false;
  return dtype != of.param_dtype && !(evaluates && dtype == of.orig_dtype);
}

bool WrongValueOfGradient(const Plan& plan, UnitId unit, BufferId bound, BufferId grad) {
  return plan.units[unit].layout == LayoutKind::kFlat &&
         plan.buffers[bound].dtype != plan.buffers[grad].dtype;
}

bool WaitBeforeRecord(const Clocks& clocks, EventId event) { return !clocks.IsRecorded(event); }

bool Deadlock(const Clocks& clocks, EventId event) { return clocks.IsStuck(event); }

LeakFault Leak(const BufferState& before, const BufferState& after, bool persistent, bool used) {
  if (!after.alive) return LeakFault::kHolds;
  if (!before.alive) return LeakFault::kNotFreed;
  return persistent || used ? LeakFault::kHolds : LeakFault::kNotUsed;
}

SteadyFault SteadyState(const BufferState& before, const BufferState& after) {
  if (before.alive && !after.alive) return SteadyFault::kGone;
  if (before.content != after.content) return SteadyFault::kContent;
  return before.gradients == after.gradients ? SteadyFault::kHolds : SteadyFault::kGradients;
}

std::vector<UnitId> SteadyStateOfUnits(const Snapshot& before, const Snapshot& after) {
  std::vector<UnitId> changed;
  for (std::size_t u = 0; u < after.bound.size(); ++u) {
    if (before.bound[u] != after.bound[u]) changed.push_back(static_cast<UnitId>(u));
  }
  return changed;
}

}  // namespace shardplan::verifier
