#include "verifier/verifier_memory.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardplan::verifier {

Memory::Memory(const Plan& plan, const Clocks& clocks, Reporter& reporter)
    : plan_(plan),
      clocks_(clocks),
      reporter_(reporter),
      slot_(plan.buffers.size(), -1),
      freed_step_(plan.buffers.size(), -1),
      freed_at_(plan.buffers.size()),
      pools_(clocks.width(), std::vector<Debt>(clocks.width())) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    if (!plan.buffers[i].persistent) continue;
    slot_[i] = NewSlot();
    Allocation& memory = slots_[slot_[i]];
    memory.owner = static_cast<BufferId>(i);
    memory.content = Content::kEverything;
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
  memory.names = 1;
  memory.pool = clocks_.host();
  memory.allocated = {};
  memory.content = Content::kNothing;
  memory.filled_parameters.clear();
  memory.debt_settled = true;
  memory.freed_parts.clear();
  memory.used_step = -1;
  memory.last_write = {};
  memory.last_access.assign(clocks_.width(), {});
  return slot;
}

void Memory::Allocate(BufferId buffer, std::int32_t pool, Position at) {
  if (IsAlive(buffer)) {
    reporter_.Add(
        Rule::kDoubleAllocate, at, buffer,
        fmt::format("{} is allocated while it is alive", reporter_.BufferName(buffer)),
        {"allocated: " + reporter_.Describe(AllocatedAt(buffer)), "again: " + reporter_.Describe(at)});
    return;
  }
  slot_[buffer] = NewSlot();
  Allocation& memory = slots_[slot_[buffer]];
  memory.owner = buffer;
  memory.pool = pool;
  memory.allocated = at;
  // Host memory is reused only after the device's copies from and to it: the host allocators see to that.
  if (plan_.buffers[buffer].memory == MemoryKind::kDevice && pool != clocks_.host()) {
    memory.debt = pools_[pool];
    memory.debt_settled = false;
  }
}

bool Memory::CheckFreeable(BufferId buffer, Position at) {
  if (!IsAlive(buffer)) {
    if (freed_step_[buffer] == step_) {
      reporter_.Add(Rule::kDoubleFree, at, buffer,
                    fmt::format("{} is freed twice", reporter_.BufferName(buffer)),
                    {"first: " + reporter_.Describe(freed_at_[buffer]), "again: " + reporter_.Describe(at)});
    } else {
      reporter_.Add(Rule::kUseUnallocated, at, buffer,
                    fmt::format("{} is freed but is not allocated", reporter_.BufferName(buffer)));
    }
    return false;
  }
  return true;
}

bool Memory::Free(BufferId buffer, const std::vector<StreamId>& safe_after, Position at) {
  if (!CheckFreeable(buffer, at)) return false;
  const std::int32_t slot = slot_[buffer];
  slot_[buffer] = -1;
  freed_step_[buffer] = step_;
  freed_at_[buffer] = at;
  Allocation& memory = slots_[slot];
  if (--memory.names > 0) return false;
  unused_slots_.push_back(slot);
  GiveBack(buffer, memory, safe_after, at);
  return true;
}

void Memory::FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts,
                       const std::vector<StreamId>& safe_after, Position at) {
  if (!CheckFreeable(buffer, at)) return;
  Allocation& memory = slots_[slot_[buffer]];
  for (const std::int32_t part : parts) {
    if (std::ranges::find(memory.freed_parts, part) == memory.freed_parts.end()) continue;
    reporter_.Add(
        Rule::kDoubleFree, at, buffer,
        fmt::format("part {} of {} is freed twice", part, reporter_.BufferName(buffer)),
        {"earlier: " + reporter_.Describe(memory.freed_parts_at), "again: " + reporter_.Describe(at)});
  }
  memory.freed_parts.insert(memory.freed_parts.end(), parts.begin(), parts.end());
  memory.freed_parts_at = at;
  GiveBack(buffer, memory, safe_after, at);
}

// What may still use the memory, behind what it is handed out for next.
void Memory::GiveBack(BufferId buffer, const Allocation& memory, const std::vector<StreamId>& safe_after,
                      Position at) {
  if (plan_.buffers[memory.owner].memory != MemoryKind::kDevice || memory.pool == clocks_.host()) return;
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
  slot_[alias] = slot_[buffer];
  ++slots_[slot_[buffer]].names;
}

void Memory::FillFrom(BufferId source, BufferId buffer, Content content) {
  Allocation& memory = slots_[slot_[buffer]];
  const std::vector<std::int32_t>& brought = plan_.buffers[source].parameters;
  const std::vector<std::int32_t>& wanted = plan_.buffers[buffer].parameters;
  std::vector<std::int32_t>& filled = memory.filled_parameters;
  if (!brought.empty() && !wanted.empty()) {
    filled.insert(filled.end(), brought.begin(), brought.end());
    const auto is_missing = [&](std::int32_t p) { return std::ranges::find(filled, p) == filled.end(); };
    if (std::ranges::any_of(wanted, is_missing)) return;
  }
  filled.clear();
  memory.content = content;
}

bool Memory::TouchesFreedPart(BufferId buffer, BufferId other) const {
  const Allocation& memory = slots_[slot_[buffer]];
  if (memory.freed_parts.empty()) return false;
  const std::vector<std::int32_t>& held = plan_.buffers[buffer].parameters;
  const bool by_parameter =
      other >= 0 && memory.owner == buffer && held.size() == plan_.buffers[buffer].parts_bytes.size();
  if (!by_parameter) return true;
  const std::vector<std::int32_t>& wanted = plan_.buffers[other].parameters;
  return wanted.empty() || std::ranges::any_of(memory.freed_parts, [&](std::int32_t part) {
           return std::ranges::binary_search(wanted, held[part]);
         });
}

bool Memory::CheckAlive(BufferId buffer, BufferId other, Position at) {
  const std::string name = reporter_.BufferName(buffer);
  if (IsAlive(buffer)) {
    if (!TouchesFreedPart(buffer, other)) return true;
    const Allocation& memory = slots_[slot_[buffer]];
    reporter_.Add(Rule::kUseAfterFree, at, buffer,
                  fmt::format("{} uses {}, of which parts were freed", reporter_.Instruction(at), name),
                  {"freed: " + reporter_.Describe(memory.freed_parts_at), "used: " + reporter_.Describe(at)});
    return false;
  }
  if (freed_step_[buffer] == step_) {
    reporter_.Add(Rule::kUseAfterFree, at, buffer,
                  fmt::format("{} uses {}, which was freed", reporter_.Instruction(at), name),
                  {"freed: " + reporter_.Describe(freed_at_[buffer]), "used: " + reporter_.Describe(at)});
  } else {
    reporter_.Add(Rule::kUseUnallocated, at, buffer,
                  fmt::format("{} uses {}, which is not allocated", reporter_.Instruction(at), name),
                  {"used: " + reporter_.Describe(at)});
  }
  return false;
}

std::vector<std::string> Memory::Chain(const Work& earlier, const Work& later) const {
  std::vector<std::string> chain = {"earlier: " + reporter_.Describe(earlier.at),
                                    "later: " + reporter_.Describe(later.at)};
  const std::string waiter = reporter_.StreamName(later.stream);
  chain.push_back(fmt::format(
      "missing: a record on {} after the earlier one, and a wait of {} for it before the later one",
      reporter_.StreamName(earlier.stream), waiter));
  return chain;
}

void Memory::CheckDebt(std::int32_t pool, const std::vector<Debt>& debt, const Work& work,
                       BufferId reused_as) {
  for (const Debt& entry : debt) {
    if (clocks_.IsBefore(entry.use, work.stream)) continue;
    std::vector<std::string> chain = Chain(entry.use, work);
    if (entry.use.stream ==
        pool) {  // free and use agree; it is the new user that runs ahead of the pool's stream
      reporter_.Add(
          Rule::kFreeBeforeLastUse, work.at, reused_as,
          fmt::format("{} is allocated on {} but first used on {}, which has not waited for it: the memory "
                      "may still be in use by {}",
                      reporter_.BufferName(reused_as), reporter_.StreamName(pool),
                      reporter_.StreamName(work.stream), reporter_.Instruction(entry.use.at)),
          std::move(chain));
      continue;
    }
    const std::string reuse = reused_as < 0 ? "the model's own memory" : reporter_.BufferName(reused_as);
    chain.insert(chain.begin() + 1, "freed: " + reporter_.Describe(entry.freed));
    reporter_.Add(Rule::kFreeBeforeLastUse, entry.freed, entry.buffer,
                  fmt::format("{} is freed while {} may still be using it: {} may get the same block, and "
                              "{} has not waited for that use",
                              reporter_.BufferName(entry.buffer), reporter_.Instruction(entry.use.at), reuse,
                              reporter_.StreamName(work.stream)),
                  std::move(chain));
  }
}

Memory::Allocation& Memory::Touch(BufferId buffer, const Work& work) {
  Allocation& memory = slots_[slot_[buffer]];
  // Only the first use needs the check: what is not ordered after it breaks another rule.
  if (!memory.debt_settled) {
    CheckDebt(memory.pool, memory.debt, work, buffer);
    memory.debt_settled = true;
  }
  memory.used_step = step_;
  return memory;
}

bool Memory::Read(BufferId buffer, const Work& work, Content needed, Rule invisible, BufferId other) {
  if (!CheckAlive(buffer, other, work.at)) return false;
  Allocation& memory = Touch(buffer, work);
  if (memory.content < needed) {
    const char* state = memory.content == Content::kNothing ? "nothing has been written to it"
                                                            : "it holds only this rank's part";
    reporter_.Add(
        invisible, work.at, buffer,
        fmt::format("{} reads {}, but {}", reporter_.Instruction(work.at), reporter_.BufferName(buffer),
                    state),
        {"allocated: " + reporter_.Describe(memory.allocated), "read: " + reporter_.Describe(work.at)});
  } else if (memory.last_write.tick > 0 && !clocks_.IsBefore(memory.last_write, work.stream)) {
    reporter_.Add(invisible, work.at, buffer,
                  fmt::format("{} reads {}, which {} writes, but {} has not waited for that",
                              reporter_.Instruction(work.at), reporter_.BufferName(buffer),
                              reporter_.Instruction(memory.last_write.at), reporter_.StreamName(work.stream)),
                  Chain(memory.last_write, work));
  }
  memory.last_access[work.stream] = work;
  return true;
}

bool Memory::Write(BufferId buffer, const Work& work) {
  if (!CheckAlive(buffer, -1, work.at)) return false;
  Allocation& memory = Touch(buffer, work);
  for (const Work& use : memory.last_access) {
    if (use.tick == 0 || clocks_.IsBefore(use, work.stream)) continue;
    reporter_.Add(
        Rule::kWriteRace, work.at, buffer,
        fmt::format("{} writes {}, which {} uses; nothing orders the two", reporter_.Instruction(work.at),
                    reporter_.BufferName(buffer), reporter_.Instruction(use.at)),
        Chain(use, work));
  }
  memory.last_access[work.stream] = work;
  memory.last_write = work;
  return true;
}

void Memory::UsePool(const Work& work) {
  CheckDebt(work.stream, pools_[work.stream], work, -1);
  // What it allocated and freed itself was used until now.
  pools_[work.stream][work.stream] = {work, work.at, -1};
}

}  // namespace shardplan::verifier
