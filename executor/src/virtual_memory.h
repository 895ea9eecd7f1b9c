// Memory of one rank of the virtual machine: pools of blocks per stream, as a caching allocator has them.
//
// [Note: when freed memory is poisoned]
// A free takes effect in host order, and the block goes to the pool of the stream S it was allocated on. What
// may then overwrite it is the first use of anything allocated later from that pool, wherever that use runs;
// the model's own compute, which allocates without instructions, uses the pool of its stream at once. So
// every freed block stays a debt of its pool; the next allocation takes the debts over and its first use
// poisons them (NaN) before anything else. A reader that is not ordered before that use finds NaN under some
// seed, and one that is ordered never does.
//
// Host memory (stream -1) is never handed out again: the host's allocators see to that nobody uses it any
// more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

struct Block {
  std::vector<std::byte> data;
  std::int64_t generation = 0;  // how often it was handed out
  bool in_use = false;
};

// A block to poison, unless it was handed out again since.
struct Debt {
  Block* block = nullptr;
  std::int64_t generation = 0;
};
using Debts = std::vector<Debt>;
void Poison(const Debts& debts);

// The memory of one buffer, or of several that are aliases.
struct Instance {
  StreamId stream = -1;
  std::vector<Block*> blocks;  // nullptr: taken out of it
  Debts debts;                 // to poison at the first use
};

// Moves the blocks of these parts to an instance of their own.
std::shared_ptr<Instance> TakeParts(Instance& from, std::span<const std::int32_t> parts);

class VirtualMemory {
 public:
  explicit VirtualMemory(std::size_t streams) : pools_(streams) {}

  // Blocks that just became free are handed out first, if they are large enough.
  std::shared_ptr<Instance> Allocate(const std::vector<Bytes>& parts_bytes, StreamId stream);
  // The last name of the instance is gone.
  void Release(const Instance& instance);
  // Adds the debts of an instance at its first use, which has none afterwards.
  void TakeDebts(Instance& instance, Debts& debts);
  // ... of a whole pool, for compute on its stream.
  void TakeDebts(StreamId stream, Debts& debts);

 private:
  struct Pool {
    std::vector<Block*> unused;  // the last one was freed last
    Debts debts;
  };
  Block* TakeBlock(Pool* pool, std::size_t bytes);

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Pool> pools_;  // by stream
};

}  // namespace shardplan::executor
