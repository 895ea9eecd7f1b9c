// SPDX-License-Identifier: Apache-2.0
// The paths through the driver: new segments, expandable segments, garbage collection, releasing the cache.
#include <algorithm>

#include "allocator/pool.h"
#include "allocator/sizes.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

void CachingAllocator::AddReserved(std::int64_t bytes) {
  stats_.reserved_bytes.value += bytes;
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, stats_.reserved_bytes);
  ++(bytes > 0 ? stats_.device_allocs : stats_.device_frees);
}

// [Note: when the cache has no block] In this order: collect garbage if that is on; ask the driver; release
// oversize blocks that make enough room (only with max_split_size) and ask again; release the whole cache and
// ask a last time.
BlockId CachingAllocator::AllocateFromDriver(const Search& search, DeviceDriver& driver) {
  auto attempt = [&] {
    const std::int64_t size = SegmentSize(settings_, {search.size}).value;
    if (settings_.allowed_bytes && stats_.reserved_bytes.value + size > settings_.allowed_bytes->value) {
      return kNoBlock;
    }
    return settings_.expandable_segments ? ExpandSegment(search, driver) : NewSegment(search, driver);
  };
  if (CollectsGarbage()) CollectGarbage(driver);
  BlockId block = attempt();
  if (block == kNoBlock && ReleaseOversize(search, driver)) block = attempt();
  if (block == kNoBlock) {
    ReleaseAll(driver);
    ++stats_.retries;
    block = attempt();
  }
  return block;
}

BlockId CachingAllocator::NewSegment(const Search& search, DeviceDriver& driver) {
  const Bytes size = SegmentSize(settings_, {search.size});
  const std::optional<DeviceAddress> address = driver.AllocateSegment(size, search.stream);
  if (!address) return kNoBlock;
  actions_.push_back({SegmentActionKind::kSegmentAlloc, *address, size});
  AddReserved(size.value);
  ++stats_.segments;
  Block block;
  block.address = *address;
  block.size = size.value;
  block.stream = search.stream;
  block.small = search.small;
  block.segment = NextSegment();
  return NewBlock(block);
}

void CachingAllocator::InsertUnmapped(BlockId id) {
  blocks_[id].state = BlockState::kUnmapped;
  std::vector<BlockId>& unmapped = PoolOf(blocks_[id].stream, blocks_[id].small).unmapped;
  auto lower = [&](BlockId a, BlockId b) { return blocks_[a].address < blocks_[b].address; };
  unmapped.insert(std::lower_bound(unmapped.begin(), unmapped.end(), id, lower), id);
}

void CachingAllocator::EraseUnmapped(BlockId id) {
  std::vector<BlockId>& unmapped = PoolOf(blocks_[id].stream, blocks_[id].small).unmapped;
  const auto found = std::find(unmapped.begin(), unmapped.end(), id);
  SHARDPLAN_ASSERT(found != unmapped.end(), "an unmapped block is in its pool's list");
  unmapped.erase(found);
}

// The first place, by address, where free and unmapped blocks in a row have room; a new reservation if there
// is none.
BlockId CachingAllocator::FindExpandable(const Search& search, DeviceDriver& driver) {
  auto usable = [&](BlockId id) {
    return id != kNoBlock &&
           (blocks_[id].state == BlockState::kFree || blocks_[id].state == BlockState::kUnmapped);
  };
  for (BlockId start : PoolOf(search.stream, search.small).unmapped) {
    if (usable(blocks_[start].previous)) start = blocks_[start].previous;
    std::int64_t room = 0;
    for (BlockId id = start; room < search.size && usable(id); id = blocks_[id].next) {
      room += blocks_[id].size;
    }
    if (room >= search.size) return start;
  }
  Reservation reservation;
  reservation.page = search.small ? kSmallSegmentBytes : settings_.large_segment_bytes.value;
  const std::int64_t total = driver.TotalMemory().value;
  reservation.size = RoundUp(total + total / 8, reservation.page);
  reservation.address = driver.ReserveAddresses({reservation.size}, search.stream);
  reservation.live = true;
  reservations_.push_back(reservation);
  Block block;
  block.address = reservation.address;
  block.size = reservation.size;
  block.stream = search.stream;
  block.small = search.small;
  block.reservation = static_cast<std::int32_t>(reservations_.size()) - 1;
  block.segment = NextSegment();
  const BlockId id = NewBlock(block);
  InsertUnmapped(id);
  return id;
}

// Maps the first `size` bytes of an unmapped block, rounded up to pages, merges them with free neighbours and
// puts the result into the free list. False: out of memory, nothing changed.
bool CachingAllocator::MapBlock(BlockId id, std::int64_t size, DeviceDriver& driver) {
  SHARDPLAN_ASSERT(blocks_[id].state == BlockState::kUnmapped, "only what is not mapped is mapped");
  const DeviceAddress address = blocks_[id].address;
  const std::int64_t mapped = RoundUp(size, reservations_[blocks_[id].reservation].page);
  if (!driver.MapPages(address, {mapped})) return false;
  EraseUnmapped(id);
  blocks_[id].state = BlockState::kFree;
  if (mapped < blocks_[id].size) {
    Block rest = blocks_[id];
    rest.address += mapped;
    rest.size -= mapped;
    const BlockId rest_id = NewBlock(rest);
    LinkAfter(rest_id, id);
    InsertUnmapped(rest_id);
    blocks_[id].size = mapped;
  }
  Merge(id, blocks_[id].previous);
  Merge(id, blocks_[id].next);
  InsertFree(id);
  actions_.push_back({SegmentActionKind::kSegmentMap, address, {mapped}});
  AddReserved(mapped);
  return true;
}

BlockId CachingAllocator::ExpandSegment(const Search& search, DeviceDriver& driver) {
  BlockId block = FindExpandable(search, driver);
  if (blocks_[block].state == BlockState::kUnmapped &&
      !MapBlock(block, std::min(blocks_[block].size, search.size), driver)) {
    return kNoBlock;
  }
  while (blocks_[block].size < search.size) {
    const BlockId next = blocks_[block].next;  // unmapped, and merged with `block` by mapping
    SHARDPLAN_ASSERT(next != kNoBlock, "FindExpandable found room in what follows");
    const std::int64_t missing = search.size - blocks_[block].size;
    if (!MapBlock(next, std::min(missing, blocks_[next].size), driver)) return kNoBlock;
    block = next;
  }
  EraseFree(block);
  return block;
}

// Gives back the pages that lie wholly in a free block.
void CachingAllocator::UnmapBlock(BlockId id, DeviceDriver& driver) {
  const Reservation& reservation = reservations_[blocks_[id].reservation];
  const DeviceAddress begin = blocks_[id].address;
  const DeviceAddress end = begin + blocks_[id].size;
  const DeviceAddress first = reservation.address + RoundUp(begin - reservation.address, reservation.page);
  const DeviceAddress last = end - (end - reservation.address) % reservation.page;
  if (first >= last) return;
  EraseFree(id);
  driver.UnmapPages(first, {last - first});
  if (first > begin) {
    Block before = blocks_[id];
    before.size = first - begin;
    const BlockId before_id = NewBlock(before);
    const BlockId previous = blocks_[id].previous;
    if (previous != kNoBlock) blocks_[previous].next = before_id;
    blocks_[before_id].next = id;
    blocks_[id].previous = before_id;
    InsertFree(before_id);
  }
  if (end > last) {
    Block after = blocks_[id];
    after.address = last;
    after.size = end - last;
    const BlockId after_id = NewBlock(after);
    LinkAfter(after_id, id);
    InsertFree(after_id);
  }
  blocks_[id].address = first;
  blocks_[id].size = last - first;
  blocks_[id].state = BlockState::kUnmapped;
  Merge(id, blocks_[id].previous);
  Merge(id, blocks_[id].next);
  InsertUnmapped(id);
  actions_.push_back({SegmentActionKind::kSegmentUnmap, first, {last - first}});
  AddReserved(first - last);
}

// The block is a whole segment in the free list.
void CachingAllocator::ReleaseSegment(BlockId id, DeviceDriver& driver) {
  const Block& block = blocks_[id];
  driver.FreeSegment(block.address, {block.size});
  actions_.push_back({SegmentActionKind::kSegmentFree, block.address, {block.size}});
  AddReserved(-block.size);
  --stats_.segments;
  EraseFree(id);
  DeleteBlock(id);
}

// Segments of the large pool that nothing uses are released when they are at least as old as the average of
// those left, in passes, until reserved memory is below the threshold. Age: searches of the large pool since
// the segment became free.
void CachingAllocator::CollectGarbage(DeviceDriver& driver) {
  const auto threshold = static_cast<std::int64_t>(settings_.garbage_collection_threshold *
                                                   static_cast<double>(settings_.allowed_bytes->value));
  const std::int64_t target = stats_.reserved_bytes.value - threshold;
  if (target <= 0) return;
  struct Candidate {
    BlockId block;
    std::int64_t age;
  };
  std::vector<Candidate> candidates;
  std::int64_t total_age = 0;
  std::int64_t count = 0;
  for (std::size_t pool = 1; pool < pools_.size(); pool += 2) {
    const FreeBlockList& free = pools_[pool].free;
    for (auto at = free.begin(); at != free.end(); at = free.Next(at)) {
      const Block& block = blocks_[free[at].block];
      if (block.previous != kNoBlock || block.next != kNoBlock) continue;
      const std::int64_t age = searches_[1] - block.gc_base;
      total_age += age;
      ++count;
      if (block.reservation < 0) candidates.push_back({free[at].block, age});
    }
  }
  std::int64_t reclaimed = 0;
  for (bool freed = true; freed && reclaimed < target && count > 0;) {
    freed = false;
    const std::int64_t pass_age = total_age, pass_count = count;
    std::erase_if(candidates, [&](const Candidate& candidate) {
      if (candidate.age * pass_count < pass_age) return false;  // younger than the average
      freed = true;
      reclaimed += blocks_[candidate.block].size;
      total_age -= candidate.age;
      --count;
      ReleaseSegment(candidate.block, driver);
      return true;
    });
  }
}

// With max_split_size: the smallest cached oversize block that alone is enough, else several, the largest
// first. True when that released enough.
bool CachingAllocator::ReleaseOversize(const Search& search, DeviceDriver& driver) {
  if (!settings_.max_split_size_bytes) return false;
  const std::int64_t wanted = std::max(search.size, max_split_);
  const FreeBlockList& free = PoolOf(search.stream, search.small).free;
  FreeBlockList::Position at = free.LowerBound(wanted);
  // Always a whole segment with settings that LibTorch accepts; a part of one cannot be released.
  auto releasable = [&](BlockId id) {
    return blocks_[id].reservation < 0 && blocks_[id].previous == kNoBlock && blocks_[id].next == kNoBlock;
  };
  if (at != free.end() && releasable(free[at].block)) {
    ReleaseSegment(free[at].block, driver);
    return true;
  }
  std::int64_t released = 0;
  std::vector<BlockId> chosen;
  while (released < wanted && at != free.begin()) {
    at = free.Previous(at);
    if (free[at].size < max_split_) break;
    if (!releasable(free[at].block)) continue;
    released += free[at].size;
    chosen.push_back(free[at].block);
  }
  for (const BlockId block : chosen) ReleaseSegment(block, driver);
  return released >= wanted;
}

void CachingAllocator::ReleaseCached(DeviceDriver& driver) {
  actions_.clear();
  ReleaseAll(driver);
}

void CachingAllocator::ReleaseAll(DeviceDriver& driver) {
  for (StreamEvents& events : events_) events.completed = events.recorded;
  ProcessEvents();
  for (const BlockId block : driver.Synchronize()) CompleteFree(block);
  ReleasePools(false, driver);
  ReleasePools(true, driver);
}

void CachingAllocator::ReleasePools(bool small, DeviceDriver& driver) {
  std::vector<BlockId> to_release, to_unmap;
  for (std::size_t pool = small ? 0 : 1; pool < pools_.size(); pool += 2) {
    const FreeBlockList& free = pools_[pool].free;
    for (auto at = free.begin(); at != free.end(); at = free.Next(at)) {
      const Block& block = blocks_[free[at].block];
      if (block.reservation >= 0) {
        to_unmap.push_back(free[at].block);
      } else if (block.previous == kNoBlock && block.next == kNoBlock) {
        to_release.push_back(free[at].block);
      }
    }
  }
  for (const BlockId block : to_release) ReleaseSegment(block, driver);
  for (const BlockId id : to_unmap) {
    UnmapBlock(id, driver);
    const Block& block = blocks_[id];
    if (block.state != BlockState::kUnmapped || block.previous != kNoBlock || block.next != kNoBlock)
      continue;
    Reservation& reservation = reservations_[block.reservation];
    driver.FreeAddresses(reservation.address, {reservation.size});
    reservation.live = false;
    EraseUnmapped(id);
    DeleteBlock(id);
  }
}

}  // namespace shardplan
