// SPDX-License-Identifier: Apache-2.0
#include "allocator/address_spaces.h"

#include <algorithm>
#include <map>

#include "allocator/sizes.h"

namespace shardplan {
namespace {

using InitialSegment = CachingAllocator::InitialSegment;

// [Note: address spaces of a log] A log has mapped ranges; the address space around them has to be inferred.
// The ranges of one stream and pool share one: LibTorch begins a second only when the first, 9/8 of the
// device's memory, is full. It begins at the lowest address that is mapped, now or later. Which pool a
// segment_map row belongs to shows in its size: the small pool maps single pages of 2 MiB, the large pool
// multiples of a larger page.
std::vector<InitialSegment> JoinRanges(std::vector<InitialSegment> segments) {
  std::map<std::pair<std::int32_t, bool>, std::size_t> spaces;  // index into joined, by stream and pool
  std::vector<InitialSegment> joined;
  for (InitialSegment& segment : segments) {
    const std::pair<std::int32_t, bool> key{segment.stream, segment.small_pool};
    if (!segment.expandable || spaces.try_emplace(key, joined.size()).second) {
      joined.push_back(std::move(segment));
      continue;
    }
    InitialSegment& space = joined[spaces[key]];
    space.mapped.insert(space.mapped.end(), segment.mapped.begin(), segment.mapped.end());
    space.blocks.insert(space.blocks.end(), segment.blocks.begin(), segment.blocks.end());
  }
  return joined;
}

// True when `address` lies in the address space of another segment of the same pool than `space`.
bool BelongsToAnother(DeviceAddress address, const InitialSegment& space, std::int64_t size,
                      const std::vector<InitialSegment>& segments) {
  return std::any_of(segments.begin(), segments.end(), [&](const InitialSegment& other) {
    return other.expandable && other.small_pool == space.small_pool && other.stream != space.stream &&
           other.address <= address && address < other.address + size;
  });
}

}  // namespace

std::vector<InitialSegment> InferAddressSpaces(const AllocatorLog& log) {
  std::vector<InitialSegment> segments = JoinRanges(log.initial_segments);
  const std::int64_t device = log.device_bytes.value_or(kUnknownDeviceBytes).value;
  for (InitialSegment& space : segments) {
    if (!space.expandable) continue;
    const std::int64_t page = space.small_pool ? kSmallSegmentBytes : log.settings.large_segment_bytes.value;
    const std::int64_t size = RoundUp(device + device / 8, page);
    const DeviceAddress lowest = space.address;
    for (const LogAction& action : log.actions) {
      const bool same_pool = (action.size_bytes.value == kSmallSegmentBytes) == space.small_pool;
      if (action.kind != LogActionKind::kSegmentMap || !same_pool || action.address >= space.address)
        continue;
      if (lowest - action.address >= size || (lowest - action.address) % page != 0) continue;
      const bool mine = action.stream >= 0 ? action.stream == space.stream
                                           : !BelongsToAnother(action.address, space, size, segments);
      if (mine) space.address = action.address;
    }
    const CachingAllocator::MappedRange& last = space.mapped.back();
    space.size_bytes = {std::max(size, last.address + last.size_bytes.value - space.address)};
  }
  return segments;
}

}  // namespace shardplan
