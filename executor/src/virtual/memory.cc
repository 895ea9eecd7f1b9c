// SPDX-License-Identifier: Apache-2.0
#include "virtual/memory.h"

#include <algorithm>
#include <utility>

#include "replay/host_kernels.h"

namespace shardplan::executor {
void Poison(Block& block) {
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  if (block.data) {
    PoisonOnHost(block.data.get(), bytes);
  } else {
    block.marks.Mark(0, bytes);
  }
}

void Poison(const Debts& debts) {
  for (const Debt& debt : debts) {
    if (debt.block->generation != debt.generation) continue;
    Poison(*debt.block);
    debt.block->poisoned = debt.freed;
  }
}

std::shared_ptr<Instance> TakeParts(Instance& from, std::span<const std::int32_t> parts) {
  auto taken = std::make_shared<Instance>();
  taken->stream = from.stream;
  for (const std::int32_t part : parts) taken->blocks.push_back(std::exchange(from.blocks[part], nullptr));
  return taken;
}

VirtualMemory::VirtualMemory(const Plan& plan, HandOut hand_out,
                             std::function<std::uint64_t(std::uint64_t)> random, VirtualContent content)
    : hand_out_(hand_out), content_(content), random_(std::move(random)), pools_(plan.streams.size()) {
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.persistent || buffer.memory != MemoryKind::kDevice) continue;
    for (const Bytes part : buffer.parts_bytes) {
      largest_bytes_ = std::max(largest_bytes_, static_cast<std::size_t>(part.value));
    }
  }
}

Block* VirtualMemory::NewBlock(std::size_t bytes) {
  blocks_.push_back(std::make_unique<Block>());
  Block& block = *blocks_.back();
  // Whoever reads it before its first use finds poison.
  if (content_ == VirtualContent::kNumbers) {
    block.data = std::make_unique_for_overwrite<std::byte[]>(bytes);
    PoisonOnHost(block.data.get(), static_cast<std::int64_t>(bytes));
  } else {
    block.marks.Mark(0, static_cast<std::int64_t>(bytes));
  }
  return &block;
}

Block* VirtualMemory::TakeBlock(Pool& pool, std::size_t bytes) {
  const bool must_fit = hand_out_ == HandOut::kLastThatFits || hand_out_ == HandOut::kAnyThatFits;
  const bool any = hand_out_ == HandOut::kAny || hand_out_ == HandOut::kAnyThatFits;
  std::vector<std::size_t> candidates;  // the last one was freed last
  for (std::size_t i = 0; i < pool.unused.size(); ++i) {
    if (!must_fit || pool.unused[i]->bytes >= bytes) candidates.push_back(i);
  }
  if (candidates.empty()) return NewBlock(must_fit ? bytes : largest_bytes_);
  const std::size_t chosen = any ? candidates[random_(candidates.size())] : candidates.back();
  Block* block = pool.unused[chosen];
  pool.unused.erase(pool.unused.begin() + static_cast<std::ptrdiff_t>(chosen));
  return block;
}

std::shared_ptr<Instance> VirtualMemory::Allocate(const std::vector<Bytes>& parts_bytes, StreamId stream) {
  auto instance = std::make_shared<Instance>();
  instance->stream = stream;
  for (const Bytes part : parts_bytes) {
    const auto bytes = static_cast<std::size_t>(part.value);
    Block* block = stream < 0 ? NewBlock(bytes) : TakeBlock(pools_[stream], bytes);
    block->bytes = bytes;
    ++block->generation;
    instance->blocks.push_back(block);
    instance->debts.push_back({block, block->generation});
  }
  if (stream >= 0) AddDebts(stream, instance->debts);
  return instance;
}

Block* VirtualMemory::Borrow(StreamId stream) {
  Pool& pool = pools_[stream];
  if (pool.unused.empty()) {
    pool.unused.push_back(NewBlock(largest_bytes_));
    pool.unused.back()->bytes = largest_bytes_;
  }
  return pool.unused[random_(pool.unused.size())];
}

void VirtualMemory::Release(const Instance& instance) {
  if (instance.stream < 0) return;
  Pool& pool = pools_[instance.stream];
  for (Block* block : instance.blocks) {
    if (block == nullptr) continue;
    block->poisoned = false;
    pool.unused.push_back(block);
    pool.debts.push_back({block, block->generation, true});
  }
}

void VirtualMemory::TakeDebts(Instance& instance, Debts& debts) {
  debts.insert(debts.end(), instance.debts.begin(), instance.debts.end());
  instance.debts.clear();
}

void VirtualMemory::AddDebts(StreamId stream, Debts& debts) {
  Debts& pool = pools_[stream].debts;
  std::erase_if(pool, [](const Debt& debt) {
    return debt.block->poisoned || debt.block->generation != debt.generation;
  });
  debts.insert(debts.end(), pool.begin(), pool.end());
}

}  // namespace shardplan::executor
