#include "virtual_memory.h"

#include <utility>

#include "host_kernels.h"

namespace shardplan::executor {
namespace {

void Append(Debts& from, Debts& to) {
  if (to.empty()) {
    std::swap(from, to);
    return;
  }
  to.insert(to.end(), from.begin(), from.end());
  from.clear();
}

}  // namespace

void Poison(const Debts& debts) {
  for (const Debt& debt : debts) {
    if (debt.block->generation != debt.generation) continue;
    PoisonOnHost(debt.block->data.data(), std::ssize(debt.block->data));
  }
}

std::shared_ptr<Instance> TakeParts(Instance& from, std::span<const std::int32_t> parts) {
  auto taken = std::make_shared<Instance>();
  taken->stream = from.stream;
  for (const std::int32_t part : parts) taken->blocks.push_back(std::exchange(from.blocks[part], nullptr));
  return taken;
}

Block* VirtualMemory::TakeBlock(Pool* pool, std::size_t bytes) {
  if (pool != nullptr) {
    for (auto it = pool->unused.rbegin(); it != pool->unused.rend(); ++it) {
      Block* block = *it;
      if (block->data.size() < bytes) continue;
      pool->unused.erase(std::next(it).base());
      return block;
    }
  }
  blocks_.push_back(std::make_unique<Block>());
  blocks_.back()->data.resize(bytes);
  return blocks_.back().get();
}

std::shared_ptr<Instance> VirtualMemory::Allocate(const std::vector<Bytes>& parts_bytes, StreamId stream) {
  auto instance = std::make_shared<Instance>();
  instance->stream = stream;
  Pool* pool = stream < 0 ? nullptr : &pools_[stream];
  for (const Bytes bytes : parts_bytes) {
    Block* block = TakeBlock(pool, static_cast<std::size_t>(bytes.value));
    block->in_use = true;
    ++block->generation;
    instance->blocks.push_back(block);
    instance->debts.push_back({block, block->generation});
  }
  if (pool == nullptr) return instance;
  for (const Debt& debt : pool->debts) {
    if (!debt.block->in_use) instance->debts.push_back(debt);
  }
  pool->debts.clear();
  return instance;
}

void VirtualMemory::Release(const Instance& instance) {
  if (instance.stream < 0) return;
  Pool& pool = pools_[instance.stream];
  for (Block* block : instance.blocks) {
    if (block == nullptr) continue;
    block->in_use = false;
    pool.unused.push_back(block);
    pool.debts.push_back({block, block->generation});
  }
}

void VirtualMemory::TakeDebts(Instance& instance, Debts& debts) { Append(instance.debts, debts); }

void VirtualMemory::TakeDebts(StreamId stream, Debts& debts) { Append(pools_[stream].debts, debts); }

}  // namespace shardplan::executor
