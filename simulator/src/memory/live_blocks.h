// SPDX-License-Identifier: Apache-2.0
// Blocks that are alive while a plan's memory is walked.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "memory/sink.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::internal {

// Bytes of a dense tensor.
inline Bytes TensorBytes(const std::vector<std::int64_t>& shape, DType dtype) {
  Bytes bytes{SizeBytes(dtype)};
  for (const std::int64_t size : shape) bytes.value *= size;
  return bytes;
}

// The position of the walk.
struct MemoryCursor {
  MemoryPoint at;
  std::int32_t microbatch = 0;  // of the compute there
};

// Blocks by number; the numbers of those that are gone are used again. The sink is told of each.
class LiveBlocks {
 public:
  LiveBlocks(MemorySink& sink, const MemoryCursor& cursor) : sink_(sink), cursor_(cursor) {}

  std::int32_t Allocate(const MemoryBlock& block) {
    auto number = static_cast<std::int32_t>(blocks_.size());
    if (unused_.empty()) {
      blocks_.push_back(block);
    } else {
      number = unused_.back();
      unused_.pop_back();
      blocks_[Index(number)] = block;
    }
    blocks_[Index(number)].born = sink_.Allocate(block, cursor_.at);
    return number;
  }
  // number: -1 is none.
  void Free(std::int32_t number, const std::vector<StreamId>& recorded_on = {}) {
    if (number < 0) return;
    MemoryBlock& block = blocks_[Index(number)];
    SHARDPLAN_ASSERT(block.died < 0, "whoever frees a block forgets it");
    if (!recorded_on.empty()) block.recorded_on = recorded_on;
    sink_.Free(block, cursor_.at);
    block.died = 0;
    unused_.push_back(number);
  }
  // The block is one of the buffer's.
  void Rename(std::int32_t number, UnitId unit, BufferId buffer, std::int32_t part) {
    MemoryBlock& block = blocks_[Index(number)];
    block.unit = unit;
    block.buffer = buffer;
    block.part = part;
    sink_.Rename(block);
  }
  const MemoryBlock& At(std::int32_t number) const { return blocks_[Index(number)]; }

  // The model's own, that no number stands for.
  void Allocate(ModelMemory& memory, UnitId unit) {
    memory.born = sink_.AllocateForModel(memory, unit, cursor_.microbatch, cursor_.at);
  }
  void Free(ModelMemory& memory) {
    if (memory.category < 0) return;
    sink_.FreeOfModel(memory, cursor_.at);
    memory.category = -1;
  }

 private:
  static std::size_t Index(std::int32_t number) { return static_cast<std::size_t>(number); }

  MemorySink& sink_;
  const MemoryCursor& cursor_;
  std::vector<MemoryBlock> blocks_;
  std::vector<std::int32_t> unused_;
};

}  // namespace shardplan::internal
