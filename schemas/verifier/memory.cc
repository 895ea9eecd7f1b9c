// SPDX-License-Identifier: Apache-2.0
#include "verifier/memory.h"

#include <algorithm>

#include "shardplan/schemas/layout.h"
#include "verifier/rules.h"

namespace shardplan::verifier {

namespace {

// The content of memory that is there before the first step. The gradient rules know that it holds no reduced
// gradients.
Content ContentAtFirst(BufferRole role) {
  switch (LifetimeOf(role)) {
    case RoleLifetime::kState:
    case RoleLifetime::kPersistent:
      return Content::kEverything;
    case RoleLifetime::kScratch:
    case RoleLifetime::kUnsharded:
    case RoleLifetime::kBackward:
    case RoleLifetime::kAccumulated:
    case RoleLifetime::kPasses:
    case RoleLifetime::kOptimizer:
      return Content::kNothing;
  }
  return Content::kNothing;
}

}  // namespace

Memory::Memory(const Plan& plan, const Clocks& clocks, Words& words)
    : plan_(plan),
      clocks_(clocks),
      words_(words),
      lifetimes_(plan.buffers.size()),
      pools_(clocks.width(), std::vector<Debt>(clocks.width())) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    if (!plan.buffers[i].persistent) continue;
    lifetimes_[i].slot = NewSlot();
    Allocation& memory = slots_[lifetimes_[i].slot];
    memory.owner = static_cast<BufferId>(i);
    memory.content = ContentAtFirst(plan.buffers[i].role);
  }
}

std::int32_t Memory::NewSlot() {
  std::int32_t slot = static_cast<std::int32_t>(slots_.size());
  if (unused_slots_.empty()) {
    slots_.emplace_back();
  } else {
    slot = unused_slots_.back();
    unused_slots_.pop_back();
  }
  Allocation& memory = slots_[slot];
  SHARDPLAN_ASSERT(memory.names == 0, "a slot is unused when no buffer refers to it");
  memory.names = 1;
  memory.pool = clocks_.host();
  memory.allocated = {};
  memory.content = Content::kNothing;
  memory.filled_parameters.clear();
  memory.cut_over = -1;
  memory.outdated.clear();
  memory.debt_settled = true;
  memory.freed_parts.clear();
  memory.used_step = -1;
  memory.last_write = {};
  memory.last_access.assign(clocks_.width(), {});
  return slot;
}

bool Memory::IsPooled(const Allocation& memory) const {
  // Host memory is reused only after the device's copies from and to it: the host allocators see to that.
  return plan_.buffers[memory.owner].memory == MemoryKind::kDevice && memory.pool != clocks_.host();
}

void Memory::Allocate(BufferId buffer, std::int32_t pool, Position at) {
  if (DoubleAllocate(lifetimes_[buffer])) return words_.AllocatedTwice(buffer, Of(buffer).allocated, at);
  lifetimes_[buffer].slot = NewSlot();
  Allocation& memory = At(buffer);
  memory.owner = buffer;
  memory.pool = pool;
  memory.allocated = at;
  if (IsPooled(memory)) {
    memory.debt = pools_[pool];
    memory.debt_settled = false;
  }
}

bool Memory::IsFreeable(BufferId buffer, Position at) {
  const Lifetime& lifetime = lifetimes_[buffer];
  if (DoubleFree(lifetime, step_)) {
    words_.FreedTwice(buffer, lifetime.freed_at, at);
    return false;
  }
  if (UseUnallocated(lifetime, step_)) {
    words_.FreedUnallocated(buffer, at);
    return false;
  }
  return true;
}

bool Memory::Free(BufferId buffer, const std::vector<StreamId>& safe_after, Position at) {
  if (!IsFreeable(buffer, at)) return false;
  const std::int32_t slot = Slot(buffer);
  lifetimes_[buffer] = {.slot = -1, .freed_step = step_, .freed_at = at};
  Allocation& memory = slots_[slot];
  SHARDPLAN_ASSERT(memory.names > 0, "a living buffer is a name of its memory");
  if (--memory.names > 0) return false;
  unused_slots_.push_back(slot);
  GiveBack(buffer, memory, safe_after, at);
  return true;
}

void Memory::FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts,
                       const std::vector<StreamId>& safe_after, Position at) {
  if (!IsFreeable(buffer, at)) return;
  Allocation& memory = At(buffer);
  for (const std::int32_t part : DoubleFreeOfParts(memory, parts)) {
    words_.PartFreedTwice(buffer, part, memory.freed_parts_at, at);
  }
  memory.freed_parts.insert(memory.freed_parts.end(), parts.begin(), parts.end());
  memory.freed_parts_at = at;
  GiveBack(buffer, memory, safe_after, at);
}

void Memory::GiveBack(BufferId buffer, const Allocation& memory, const std::vector<StreamId>& safe_after,
                      Position at) {
  if (!IsPooled(memory)) return;
  std::vector<Debt>& pool = pools_[memory.pool];
  for (const Work& use : memory.last_access) {
    if (use.tick == 0) continue;
    // The block is held back until the work issued so far on these streams is done, and all that it waited
    // for.
    const auto is_held_back = [&](StreamId stream) { return clocks_.IsBefore(use, stream); };
    if (std::ranges::any_of(safe_after, is_held_back)) continue;
    if (use.tick > pool[use.stream].use.tick) pool[use.stream] = {use, at, buffer};
  }
}

void Memory::MakeAlias(BufferId alias, BufferId buffer) {
  SHARDPLAN_ASSERT(!IsAlive(alias), "a view has no memory of its own");
  ++At(buffer).names;
  lifetimes_[alias].slot = Slot(buffer);
}

void Memory::FillFrom(BufferId source, BufferId buffer, Content content) {
  Allocation& memory = At(buffer);
  std::vector<std::int32_t>& filled = memory.filled_parameters;
  if (plan_.buffers[source].parameters != plan_.buffers[buffer].parameters) {
    const std::vector<std::int32_t> brought = ParametersOf(plan_, plan_.buffers[source]);
    const std::vector<std::int32_t> wanted = ParametersOf(plan_, plan_.buffers[buffer]);
    filled.insert(filled.end(), brought.begin(), brought.end());
    const auto is_missing = [&](std::int32_t p) { return std::ranges::find(filled, p) == filled.end(); };
    if (std::ranges::any_of(wanted, is_missing)) return;
  }
  filled.clear();
  memory.content = content;
}

void Memory::Outdate(BufferId buffer, std::int32_t parameter, Position at) {
  const std::vector<std::int32_t>& held = plan_.buffers[buffer].parameters;
  if (!held.empty() && std::ranges::find(held, parameter) == held.end()) return;
  Allocation& memory = At(buffer);
  memory.outdated_at = at;
  if (std::ranges::find(memory.outdated, parameter) == memory.outdated.end()) {
    memory.outdated.push_back(parameter);
  }
}

void Memory::PassAge(BufferId source, BufferId buffer) {
  if (source == buffer) return;
  Allocation& memory = At(buffer);
  const Allocation& from = Of(source);
  if (memory.outdated.empty() && from.outdated.empty()) return;
  for (const std::int32_t p : ParametersOf(plan_, plan_.buffers[source])) std::erase(memory.outdated, p);
  for (const std::int32_t p : from.outdated) Outdate(buffer, p, from.outdated_at);
}

bool Memory::IsUsable(BufferId buffer, BufferId other, Position at) {
  const Lifetime& lifetime = lifetimes_[buffer];
  if (UseAfterFree(lifetime, step_)) {
    words_.UsedAfterFree(buffer, lifetime.freed_at, at);
    return false;
  }
  if (UseUnallocated(lifetime, step_)) {
    words_.UsedUnallocated(buffer, at);
    return false;
  }
  if (UseAfterFreeOfParts(plan_, Of(buffer), buffer, other)) {
    words_.UsedAfterFreeOfParts(buffer, Of(buffer).freed_parts_at, at);
    return false;
  }
  return true;
}

void Memory::SettleDebt(BufferId buffer, Allocation& memory, const Work& first_use) {
  if (memory.debt_settled) return;  // what is not ordered after the first use breaks another rule
  memory.debt_settled = true;
  for (const Debt& debt : FreeBeforeLastUse(memory.debt, first_use, clocks_)) {
    words_.FreedTooEarly(memory.pool, debt, first_use, buffer);
  }
}

bool Memory::Read(BufferId buffer, const Work& work, Content needed, Rule rule, BufferId other) {
  if (!IsUsable(buffer, other, work.at)) return false;
  Allocation& memory = At(buffer);
  SettleDebt(buffer, memory, work);
  switch (ReadBeforeWrite(memory, needed, work, clocks_)) {
    case ReadFault::kHolds:
      break;
    case ReadFault::kTooLittle:
      words_.ReadTooLittle(rule, buffer, memory, work);
      break;
    case ReadFault::kNotOrdered:
      words_.ReadNotOrdered(rule, buffer, memory.last_write, work);
      break;
  }
  memory.used_step = step_;
  memory.last_access[work.stream] = work;
  return true;
}

bool Memory::Write(BufferId buffer, const Work& work) {
  if (!IsUsable(buffer, -1, work.at)) return false;
  Allocation& memory = At(buffer);
  SettleDebt(buffer, memory, work);
  for (const Work& other : WriteRace(memory, work, clocks_)) words_.WrittenInRace(buffer, other, work);
  memory.used_step = step_;
  memory.last_access[work.stream] = work;
  memory.last_write = work;
  return true;
}

void Memory::UsePool(const Work& work) {
  std::vector<Debt>& pool = pools_[work.stream];
  for (const Debt& debt : FreeBeforeLastUse(pool, work, clocks_)) {
    words_.FreedTooEarly(work.stream, debt, work, -1);
  }
  pool[work.stream] = {work, work.at, -1};  // what it allocated and freed itself was used until now
}

}  // namespace shardplan::verifier
