// SPDX-License-Identifier: Apache-2.0
#include "memory/buffer_memory.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "allocator/sizes.h"
#include "cost/optimizer_cost.h"
#include "memory/categories.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::internal {
namespace {

// c10's CachingHostAllocator takes the next power of two.
Bytes Taken(const Buffer& buffer, Bytes requested) {
  if (buffer.memory != MemoryKind::kPinnedHost || requested.value <= 0) return requested;
  return {static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(requested.value)))};
}

void NoteRecorded(std::vector<StreamId>& all, const std::vector<StreamId>& more) {
  for (const StreamId stream : more) {
    if (std::ranges::find(all, stream) == all.end()) all.push_back(stream);
  }
}

}  // namespace

BufferMemory::BufferMemory(const Plan& plan, MemorySpace space, LiveBlocks& blocks,
                           const MemoryCursor& cursor)
    : plan_(plan), space_(space), blocks_(blocks), cursor_(cursor), memory_of_(plan.buffers.size(), -1) {
  FindViews();
}

// A reduce-scatter output that becomes the gradient itself (a cast to its own dtype is a view) counts as
// the gradient for its whole life, as a memory tracker that names storages by their end does.
void BufferMemory::FindViews() {
  AliveBuffers alive(plan_);
  std::vector<MemoryPoint> allocated(plan_.buffers.size());
  for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
    const std::vector<Trigger>& triggers = plan_.steps[s].triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
        const Instruction& instruction = triggers[t].instructions[i];
        if (instruction.kind == InstructionKind::kAllocate && instruction.dst >= 0 &&
            instruction.dst < std::ssize(plan_.buffers)) {
          allocated[static_cast<std::size_t>(instruction.dst)] = {
              static_cast<std::int32_t>(s), static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)};
        } else if (alive.MakesView(instruction)) {
          const MemoryPoint& at = allocated[static_cast<std::size_t>(instruction.src)];
          // A gradient that a segment made has no allocation in the plan.
          if (at.step >= 0) {
            becomes_[{at.step, at.trigger, at.instruction}] = CategoryOf(BufferOf(instruction.dst).role);
          }
        }
        alive.Pass(instruction);
      }
    }
  }
}

BufferMemory::Memory& BufferMemory::NewMemory(BufferId id) {
  std::int32_t index = static_cast<std::int32_t>(memories_.size());
  if (unused_memories_.empty()) {
    memories_.emplace_back();
  } else {
    index = unused_memories_.back();
    unused_memories_.pop_back();
  }
  MemoryIndex(id) = index;
  Memory& memory = MemoryAt(index);
  memory.names = 1;
  memory.recorded_on.clear();
  memory.parts.assign(BufferOf(id).parts_bytes.size(), -1);
  return memory;
}

bool BufferMemory::IsHere(const Buffer& buffer) const {
  return (buffer.memory == MemoryKind::kDevice) == on_device();
}

std::vector<std::int32_t>& BufferMemory::PartsOf(BufferId id) {
  return (IsAlive(id) ? MemoryAt(MemoryIndex(id)) : NewMemory(id)).parts;
}

void BufferMemory::MakeShard(const ShardMade& shard) {
  const Buffer& buffer = BufferOf(shard.buffer);
  std::vector<std::int32_t>& parts = PartsOf(shard.buffer);
  if (!IsHere(buffer)) return;
  const auto part = static_cast<std::size_t>(shard.part);
  parts[part] = blocks_.Allocate({.requested_bytes = Taken(buffer, buffer.parts_bytes[part]),
                                  .category = CategoryOf(buffer.role),
                                  .unit = buffer.unit,
                                  .buffer = shard.buffer,
                                  .part = shard.part});
}

void BufferMemory::Allocate(BufferId id, StreamId stream) {
  if (IsAlive(id)) return;
  const Buffer& buffer = BufferOf(id);
  Memory& memory = NewMemory(id);
  if (!IsHere(buffer)) return;
  MemoryBlock block{
      .category = CategoryMadeHere(buffer), .stream = std::max(stream, 0), .unit = buffer.unit, .buffer = id};
  if (IsOneAllocation(buffer)) {
    block.requested_bytes = Taken(buffer, SizeBytes(buffer));
    memory.parts[0] = blocks_.Allocate(block);
    return;
  }
  for (std::size_t p = 0; p < buffer.parts_bytes.size(); ++p) {
    block.requested_bytes = Taken(buffer, buffer.parts_bytes[p]);
    block.part = static_cast<std::int32_t>(p);
    memory.parts[p] = blocks_.Allocate(block);
  }
}

std::int32_t BufferMemory::CategoryMadeHere(const Buffer& buffer) const {
  if (!becomes_.empty()) {
    const MemoryPoint& at = cursor_.at;
    const auto found = becomes_.find({at.step, at.trigger, at.instruction});
    if (found != becomes_.end()) return found->second;
  }
  return CategoryOf(buffer.role);
}

void BufferMemory::Free(BufferId id, const std::vector<std::int32_t>& parts,
                        const std::vector<StreamId>& recorded_on) {
  if (IsAlive(id)) NoteRecorded(MemoryAt(MemoryIndex(id)).recorded_on, recorded_on);
  if (!parts.empty()) {
    if (IsAlive(id)) FreeParts(MemoryAt(MemoryIndex(id)), parts);
    return;
  }
  const std::int32_t index = std::exchange(MemoryIndex(id), -1);
  if (index < 0) return;
  Memory& memory = MemoryAt(index);
  SHARDPLAN_ASSERT(memory.names > 0, "each buffer that names the memory was counted");
  if (--memory.names > 0) return;
  for (const std::int32_t block : memory.parts) blocks_.Free(block, memory.recorded_on);
  unused_memories_.push_back(index);
}

void BufferMemory::FreeParts(Memory& memory, const std::vector<std::int32_t>& parts) {
  for (const std::int32_t part : parts) {
    if (part < 0 || part >= std::ssize(memory.parts)) continue;
    blocks_.Free(std::exchange(memory.parts[static_cast<std::size_t>(part)], -1), memory.recorded_on);
  }
}

void BufferMemory::MakeView(BufferId src, BufferId dst) {
  if (!IsAlive(src) || IsAlive(dst)) return;
  MemoryIndex(dst) = MemoryIndex(src);
  ++MemoryAt(MemoryIndex(src)).names;
}

}  // namespace shardplan::internal
