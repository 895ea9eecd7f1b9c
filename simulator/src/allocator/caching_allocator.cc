// SPDX-License-Identifier: Apache-2.0
// The paths without the driver: best fit, splitting, merging, frees that wait. caching_allocator_driver.cc
// has the rest.
#include "shardplan/simulator/caching_allocator.h"

#include <algorithm>
#include <limits>

#include "allocator/pool.h"
#include "allocator/sizes.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {

CachingAllocator::CachingAllocator(AllocatorSettings settings)
    : settings_(settings),
      max_split_(settings.max_split_size_bytes ? settings.max_split_size_bytes->value
                                               : std::numeric_limits<std::int64_t>::max()) {}

CachingAllocator::CachingAllocator(const CachingAllocator& other) = default;
CachingAllocator::CachingAllocator(CachingAllocator&& other) noexcept = default;
CachingAllocator& CachingAllocator::operator=(const CachingAllocator& other) = default;
CachingAllocator& CachingAllocator::operator=(CachingAllocator&& other) noexcept = default;
CachingAllocator::~CachingAllocator() = default;

CachingAllocator::Pool& CachingAllocator::PoolOf(std::int32_t stream, bool small) {
  const std::size_t index = 2 * static_cast<std::size_t>(stream) + (small ? 0 : 1);
  if (index >= pools_.size()) pools_.resize((index | 1) + 1);
  return pools_[index];
}

CachingAllocator::StreamEvents& CachingAllocator::EventsOf(std::int32_t stream) {
  const std::size_t index = static_cast<std::size_t>(stream);
  if (index >= events_.size()) events_.resize(index + 1);
  return events_[index];
}

BlockId CachingAllocator::NewBlock(const Block& block) {
  BlockId id;
  if (unused_.empty()) {
    id = static_cast<BlockId>(blocks_.size());
    blocks_.push_back(block);
  } else {
    id = unused_.back();
    unused_.pop_back();
    blocks_[id] = block;
  }
  blocks_[id].live = true;
  return id;
}

void CachingAllocator::DeleteBlock(BlockId block) {
  blocks_[block].live = false;
  unused_.push_back(block);
}

void CachingAllocator::InsertFree(BlockId id) {
  Block& block = blocks_[id];
  block.state = BlockState::kFree;
  block.gc_base = searches_[block.small ? 0 : 1];
  PoolOf(block.stream, block.small).free.Insert({block.size, block.segment, block.address, id});
}

void CachingAllocator::EraseFree(BlockId id) {
  const Block& block = blocks_[id];
  PoolOf(block.stream, block.small).free.Erase({block.size, block.segment, block.address, id});
}

// Puts `block` between `before` and what follows it.
void CachingAllocator::LinkAfter(BlockId block, BlockId before) {
  const BlockId after = blocks_[before].next;
  blocks_[before].next = block;
  blocks_[block].previous = before;
  blocks_[block].next = after;
  if (after != kNoBlock) blocks_[after].previous = block;
}

bool CachingAllocator::IsAllocated(BlockId block) const {
  return block >= 0 && block < static_cast<BlockId>(blocks_.size()) && blocks_[block].live &&
         blocks_[block].state == BlockState::kAllocated;
}

bool CachingAllocator::HasCachedBlock(Bytes requested, std::int32_t stream) const {
  if (requested.value == 0) return true;
  const std::int64_t size = RoundedSize(settings_, requested).value;
  return FindFree({size, stream, IsSmall(size)}) != kNoBlock;
}

BlockId CachingAllocator::Allocate(Bytes requested, std::int32_t stream, DeviceDriver& driver) {
  actions_.clear();
  if (requested.value == 0) return kEmptyBlock;
  if (waiting_events_ > 0) ProcessEvents();
  const std::int64_t size = RoundedSize(settings_, requested).value;
  const Search search{size, stream, IsSmall(size)};
  if (CollectsGarbage()) ++searches_[search.small ? 0 : 1];
  BlockId block = FindFree(search);
  if (block != kNoBlock) {
    EraseFree(block);
  } else {
    block = AllocateFromDriver(search, driver);
    if (block == kNoBlock) {
      ++stats_.ooms;
      return kNoBlock;
    }
  }
  return HandOut(block, search, requested.value);
}

// Best fit: the smallest free block of the stream that is large enough, the lowest address among equals (with
// older_segments_first that of the oldest segment), with two exceptions. A block at the growing end of an
// expandable segment counts as large as it could become, so that a whole block is preferred; and neither may
// an oversize block serve a request that is not, nor a much larger one a request that is.
BlockId CachingAllocator::FindFree(const Search& search) const {
  const std::size_t index = 2 * static_cast<std::size_t>(search.stream) + (search.small ? 0 : 1);
  if (index >= pools_.size()) return kNoBlock;
  const FreeBlockList& free = pools_[index].free;
  FreeBlockList::Position position = free.LowerBound(search.size);
  if (position == free.end()) return kNoBlock;
  auto block_at = [&](FreeBlockList::Position at) -> const Block& { return blocks_[free[at].block]; };
  if (block_at(position).reservation >= 0) {
    if (settings_.expandable_segments) {
      auto size_when_expanded = [&](FreeBlockList::Position at) {
        const Block& block = block_at(at);
        const bool grows = block.next != kNoBlock && blocks_[block.next].state == BlockState::kUnmapped;
        return block.size + (grows ? blocks_[block.next].size : 0);
      };
      FreeBlockList::Position next = free.Next(position);
      while (block_at(position).reservation >= 0 && next != free.end() &&
             size_when_expanded(next) < size_when_expanded(position)) {
        position = next;
        next = free.Next(next);
      }
    } else {
      do {
        position = free.Next(position);
      } while (position != free.end() && block_at(position).reservation >= 0);
      if (position == free.end()) return kNoBlock;
    }
  }
  const std::int64_t found = free[position].size;
  if (search.size < max_split_ ? found >= max_split_
                               : found >= search.size + settings_.max_non_split_rounding_bytes.value) {
    return kNoBlock;
  }
  return free[position].block;
}

bool CachingAllocator::ShouldSplit(const Block& block, std::int64_t size) const {
  const std::int64_t remaining = block.size - size;
  if (block.small || settings_.expandable_segments) return remaining >= kMinBlockBytes;
  return size < max_split_ && remaining > kSmallBytes;
}

// `id` is free and in no list.
BlockId CachingAllocator::HandOut(BlockId id, const Search& search, std::int64_t requested) {
  SHARDPLAN_ASSERT(blocks_[id].size >= search.size, "FindFree and the driver give enough");
  const bool was_split = blocks_[id].previous != kNoBlock || blocks_[id].next != kNoBlock;
  const bool counts_as_split = blocks_[id].reservation < 0;
  std::int64_t inactive_split_change = was_split ? -blocks_[id].size : 0;
  if (ShouldSplit(blocks_[id], search.size)) {
    Block remaining = blocks_[id];
    remaining.address += search.size;
    remaining.size -= search.size;
    inactive_split_change += remaining.size;
    const BlockId remaining_id = NewBlock(remaining);
    LinkAfter(remaining_id, id);
    InsertFree(remaining_id);
    blocks_[id].size = search.size;
  }
  Block& block = blocks_[id];
  block.state = BlockState::kAllocated;
  block.requested = requested;
  if (counts_as_split) stats_.inactive_split_bytes.value += inactive_split_change;
  ++stats_.allocations;
  stats_.requested_bytes.value += requested;
  stats_.allocated_bytes.value += block.size;
  stats_.active_bytes.value += block.size;
  stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
  stats_.peak_active_bytes = std::max(stats_.peak_active_bytes, stats_.active_bytes);
  return id;
}

void CachingAllocator::DeferFree(BlockId id) {
  if (id == kEmptyBlock) return;
  SHARDPLAN_ASSERT(IsAllocated(id), "the caller frees what it was given, once");
  blocks_[id].state = BlockState::kAwaitingEvents;
  --stats_.allocations;
  stats_.allocated_bytes.value -= blocks_[id].size;
}

void CachingAllocator::CompleteFree(BlockId id) {
  if (id == kEmptyBlock) return;
  SHARDPLAN_ASSERT(blocks_[id].live && blocks_[id].state == BlockState::kAwaitingEvents,
                   "the caller completes what it deferred, once");
  FinishFree(id);
}

void CachingAllocator::Free(BlockId id) {
  if (id == kEmptyBlock) return;
  DeferFree(id);
  if (!blocks_[id].recorded_streams) {
    FinishFree(id);
    return;
  }
  blocks_[id].recorded_streams = false;
  const auto uses = stream_uses_.find(id);
  SHARDPLAN_ASSERT(uses != stream_uses_.end(), "RecordStream notes the stream where it sets the flag");
  for (const std::int32_t stream : uses->second) {
    StreamEvents& events = EventsOf(stream);
    events.waiting.push_back(id);
    ++events.recorded;
    ++waiting_events_;
    ++blocks_[id].pending_events;
  }
  stream_uses_.erase(uses);
}

void CachingAllocator::RecordStream(BlockId id, std::int32_t stream) {
  if (id == kEmptyBlock || stream == blocks_[id].stream) return;
  SHARDPLAN_ASSERT(IsAllocated(id), "only a block in use can be used on another stream");
  std::vector<std::int32_t>& streams = stream_uses_[id];
  const auto place = std::lower_bound(streams.begin(), streams.end(), stream);
  if (place == streams.end() || *place != stream) streams.insert(place, stream);
  blocks_[id].recorded_streams = true;
}

std::int64_t CachingAllocator::RecordedEvents(std::int32_t stream) const {
  const std::size_t index = static_cast<std::size_t>(stream);
  return index < events_.size() ? events_[index].recorded : 0;
}

void CachingAllocator::CompleteEvents(std::int32_t stream, std::int64_t count) {
  StreamEvents& events = EventsOf(stream);
  events.completed = std::max(events.completed, std::min(count, events.recorded));
}

void CachingAllocator::ProcessEvents() {
  for (StreamEvents& events : events_) {
    for (; events.processed < events.completed; ++events.processed) {
      SHARDPLAN_ASSERT(!events.waiting.empty(), "every recorded event has a block that waits");
      const BlockId block = events.waiting.front();
      events.waiting.pop_front();
      --waiting_events_;
      if (--blocks_[block].pending_events == 0) FinishFree(block);
    }
  }
}

// Merges with free neighbours and puts the result into the free list.
void CachingAllocator::FinishFree(BlockId id) {
  const std::int64_t size = blocks_[id].size;
  SHARDPLAN_ASSERT(blocks_[id].pending_events == 0, "the free waits for its last event");
  blocks_[id].state = BlockState::kFree;
  stats_.active_bytes.value -= size;
  stats_.requested_bytes.value -= blocks_[id].requested;
  std::int64_t inactive_split_change = -Merge(id, blocks_[id].previous);
  inactive_split_change -= Merge(id, blocks_[id].next);
  const Block& block = blocks_[id];
  if (block.previous != kNoBlock || block.next != kNoBlock) inactive_split_change += block.size;
  if (block.reservation < 0) stats_.inactive_split_bytes.value += inactive_split_change;
  InsertFree(id);
}

// Makes `other`, a neighbour or none, part of `into` when both are free or both are unmapped; returns its
// size, or 0. `into` is in no list.
std::int64_t CachingAllocator::Merge(BlockId into_id, BlockId other_id) {
  if (other_id == kNoBlock || blocks_[other_id].state != blocks_[into_id].state) return 0;
  Block& into = blocks_[into_id];
  const Block& other = blocks_[other_id];
  if (other.state == BlockState::kFree) {
    EraseFree(other_id);
  } else {
    EraseUnmapped(other_id);
  }
  if (into.previous == other_id) {
    SHARDPLAN_ASSERT(other.address + other.size == into.address, "neighbours in the list touch");
    into.address = other.address;
    into.previous = other.previous;
    if (into.previous != kNoBlock) blocks_[into.previous].next = into_id;
  } else {
    SHARDPLAN_ASSERT(into.address + into.size == other.address, "neighbours in the list touch");
    into.next = other.next;
    if (into.next != kNoBlock) blocks_[into.next].previous = into_id;
  }
  into.size += other.size;
  DeleteBlock(other_id);
  return other.size;
}

}  // namespace shardplan
