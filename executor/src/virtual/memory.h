// SPDX-License-Identifier: Apache-2.0
// Memory of one rank of the virtual machine: pools of blocks per stream, as a caching allocator has them.
//
// [Note: when freed memory is poisoned]
// A free takes effect in host order, and the block goes to the pool of the stream S it was allocated on. The
// first use of anything allocated later from that pool may then overwrite it, wherever that use runs; the
// model's own compute, which allocates without instructions, uses the pool of its stream at once. So every
// freed block is a debt of its pool until it is poisoned (NaN) or handed out; every allocation takes the
// debts of that moment over, and its first use poisons them before anything else. A reader that is not
// ordered before that use finds NaN under some seed, and one that is ordered never does.
//
// [Note: which block is handed out]
// A caching allocator splits and merges blocks, so whatever was freed may become a part of whatever is
// allocated next. A seed hands out the block that was freed last, or any of them; only those that are large
// enough, or all: then every block has room for the largest part of the plan.
//
// The model's own allocations and frees are handed out like all else, while its compute still waits for its
// turn: each compute borrows a block of its stream's pool and poisons it when it runs.
//
// A block that a free holds back for other streams (`safe_after`) is back in its pool when the next
// allocation, or the model's next compute, finds that these streams are done: at once, where they have
// nothing to do.
//
// Host memory (stream -1) is never handed out again: the host's allocators see to that nobody uses it any
// more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "shardplan/executor/virtual_backend.h"
#include "shardplan/schemas/plan.h"
#include "virtual/poison_marks.h"

namespace shardplan::executor {

struct Block {
  std::unique_ptr<std::byte[]> data;  // kNumbers
  PoisonMarks marks;                  // kMarks
  std::size_t bytes = 0;              // that were handed out
  std::int64_t generation = 0;        // how often it was handed out
  bool poisoned = false;              // since it was freed
};

// A byte of a block, as the work that was issued with it sees it whatever becomes of the block.
struct Place {
  Block* block = nullptr;
  std::int64_t offset = 0;
  std::byte* data() const { return block->data.get() + offset; }
};

// A block to poison, unless it was handed out again since: new memory of its owner, or freed memory.
struct Debt {
  Block* block = nullptr;
  std::int64_t generation = 0;
  bool freed = false;
};
using Debts = std::vector<Debt>;
void Poison(const Debts& debts);
// All of the block.
void Poison(Block& block);

// The memory of one buffer, or of several that are aliases.
struct Instance {
  StreamId stream = -1;
  std::vector<Block*> blocks;  // nullptr: taken out of it
  Debts debts;                 // to poison at the first use
};

// Moves the blocks of these parts to an instance of their own.
std::shared_ptr<Instance> TakeParts(Instance& from, std::span<const std::int32_t> parts);

// How blocks are handed out.
enum class HandOut : std::uint8_t { kLastThatFits, kAnyThatFits, kLast, kAny };

class VirtualMemory {
 public:
  // `random(n)`: a number in [0, n).
  VirtualMemory(const Plan& plan, HandOut hand_out, std::function<std::uint64_t(std::uint64_t)> random,
                VirtualContent content = VirtualContent::kNumbers);

  std::shared_ptr<Instance> Allocate(const std::vector<Bytes>& parts_bytes, StreamId stream);
  // The last name of the instance is gone.
  void Release(const Instance& instance);
  // Adds the debts of an instance at its first use, which has none afterwards.
  void TakeDebts(Instance& instance, Debts& debts);
  // ... of a whole pool, for compute on its stream.
  void AddDebts(StreamId stream, Debts& debts);
  // A block that compute on the stream takes and gives back before the host goes on. Compute writes to it
  // when its turn comes, whoever has got it meanwhile.
  Block* Borrow(StreamId stream);

 private:
  struct Pool {
    std::vector<Block*> unused;  // the last one was freed last
    Debts debts;
  };
  Block* TakeBlock(Pool& pool, std::size_t bytes);
  Block* NewBlock(std::size_t bytes);

  const HandOut hand_out_;
  const VirtualContent content_;
  std::function<std::uint64_t(std::uint64_t)> random_;
  std::size_t largest_bytes_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Pool> pools_;  // by stream
};

}  // namespace shardplan::executor
