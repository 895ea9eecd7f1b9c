// SPDX-License-Identifier: Apache-2.0
// The memory of a plan's buffers in one memory space.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "memory/live_blocks.h"
#include "memory/shard_order.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

class BufferMemory {
 public:
  BufferMemory(const Plan& plan, MemorySpace space, LiveBlocks& blocks, const MemoryCursor& cursor);

  // A part of a shard, made while the model is sharded.
  void MakeShard(const ShardMade& shard);
  // Nothing where it is alive. The buffer's use: its role, or that of what becomes of it.
  void Allocate(BufferId id, StreamId stream);
  // `parts`: only these; empty: what is left.
  void Free(BufferId id, const std::vector<std::int32_t>& parts = {},
            const std::vector<StreamId>& recorded_on = {});
  // dst is a second name of src's memory.
  void MakeView(BufferId src, BufferId dst);

  bool IsAlive(BufferId id) const { return memory_of_[static_cast<std::size_t>(id)] >= 0; }
  // Its blocks by part, -1 where there is none. A buffer that is not alive is from now on.
  std::vector<std::int32_t>& PartsOf(BufferId id);
  // Whether its memory is in the space that is walked.
  bool IsHere(const Buffer& buffer) const;
  bool on_device() const { return space_ == MemorySpace::kDevice; }

 private:
  // Memory that one buffer, or several (views), name.
  struct Memory {
    std::int32_t names = 0;
    std::vector<StreamId> recorded_on;  // by the frees of its names so far
    std::vector<std::int32_t> parts;    // blocks, -1 where there is none
  };

  const Buffer& BufferOf(BufferId id) const { return plan_.buffers[static_cast<std::size_t>(id)]; }
  std::int32_t& MemoryIndex(BufferId id) { return memory_of_[static_cast<std::size_t>(id)]; }
  Memory& MemoryAt(std::int32_t index) { return memories_[static_cast<std::size_t>(index)]; }
  Memory& NewMemory(BufferId id);
  void FindViews();
  std::int32_t CategoryMadeHere(const Buffer& buffer) const;
  void FreeParts(Memory& memory, const std::vector<std::int32_t>& parts);

  const Plan& plan_;
  const MemorySpace space_;
  LiveBlocks& blocks_;
  const MemoryCursor& cursor_;
  std::vector<std::int32_t> memory_of_;  // by buffer: index into memories_, -1: not alive
  std::vector<Memory> memories_;
  std::vector<std::int32_t> unused_memories_;
  // Allocations (step, trigger, instruction) whose memory ends in another role.
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> becomes_;
};

}  // namespace shardplan::internal
