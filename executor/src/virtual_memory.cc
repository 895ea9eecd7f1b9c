#include "virtual_memory.h"

#include <algorithm>
#include <utility>

#include "host_kernels.h"

namespace shardplan::executor {

void Poison(const std::vector<Debt>& debts) {
  for (const Debt& debt : debts) {
    if (debt.block->generation != debt.generation) continue;
    PoisonOnHost(debt.block->data.data(), std::ssize(debt.block->data));
  }
}

Block* VirtualMemory::TakeBlock(Pool& pool, std::size_t bytes) {
  for (auto it = pool.unused.rbegin(); it != pool.unused.rend(); ++it) {
    Block* block = *it;
    if (block->data.size() < bytes) continue;
    pool.unused.erase(std::next(it).base());
    return block;
  }
  blocks_.push_back(std::make_unique<Block>());
  blocks_.back()->data.resize(bytes);
  return blocks_.back().get();
}

std::shared_ptr<Instance> VirtualMemory::Allocate(const std::vector<Bytes>& parts_bytes, StreamId stream) {
  auto instance = std::make_shared<Instance>();
  instance->stream = stream;
  Pool& pool = stream < 0 ? pools_.back() : pools_[stream];
  for (const Bytes bytes : parts_bytes) {
    Block* block = TakeBlock(pool, static_cast<std::size_t>(bytes.value));
    block->in_use = true;
    ++block->generation;
    instance->blocks.push_back(block);
    instance->debts.push_back({block, block->generation});
  }
  for (const Debt& debt : pool.debts) {
    if (!debt.block->in_use) instance->debts.push_back(debt);
  }
  pool.debts.clear();
  return instance;
}

void VirtualMemory::Release(const Instance& instance) {
  Pool& pool = instance.stream < 0 ? pools_.back() : pools_[instance.stream];
  for (Block* block : instance.blocks) {
    block->in_use = false;
    pool.unused.push_back(block);
    pool.debts.push_back({block, block->generation});
  }
}

std::vector<Debt> VirtualMemory::TakeDebts(Instance& instance) { return std::exchange(instance.debts, {}); }

std::vector<Debt> VirtualMemory::TakeDebts(StreamId stream) {
  return std::exchange(pools_[stream].debts, {});
}

}  // namespace shardplan::executor
