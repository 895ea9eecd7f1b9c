// SPDX-License-Identifier: Apache-2.0
// Short words for the tests of the allocator.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

inline constexpr std::int64_t kKiB = 1 << 10;
inline constexpr std::int64_t kMiB = 1 << 20;
inline constexpr std::int64_t kGiB = 1 << 30;

// An allocator on a device of its own.
struct TestAllocator {
  explicit TestAllocator(AllocatorSettings settings = {}, Bytes device_bytes = {8 * kGiB})
      : allocator(settings), device(device_bytes) {}

  BlockId Allocate(std::int64_t bytes, std::int32_t stream = 0) {
    return allocator.Allocate({bytes}, stream, device);
  }
  DeviceAddress Address(BlockId block) const { return allocator.Address(block); }
  std::int64_t Size(BlockId block) const { return allocator.Size(block).value; }
  std::int64_t Reserved() const { return allocator.stats().reserved_bytes.value; }
  void Free(BlockId block) { allocator.Free(block); }
  // Sizes of all blocks of the only segment, free ones negative, unmapped ones left out.
  std::vector<std::int64_t> Blocks() const {
    std::vector<std::int64_t> sizes;
    const std::vector<SegmentView> segments = allocator.MemoryMap();
    EXPECT_EQ(segments.size(), 1U);
    for (const BlockView& block : segments.at(0).blocks) {
      if (block.state == BlockState::kUnmapped) continue;
      sizes.push_back(block.state == BlockState::kFree ? -block.size_bytes.value : block.size_bytes.value);
    }
    return sizes;
  }
  std::vector<SegmentAction> Actions() const { return allocator.last_actions(); }

  CachingAllocator allocator;
  SimpleDevice device;
};

// Blocks tile their segments, neighbours differ, sums agree with the statistics.
inline void CheckInvariants(const CachingAllocator& allocator) {
  std::int64_t reserved = 0, allocated = 0, active = 0, inactive_split = 0;
  DeviceAddress previous_end = std::numeric_limits<DeviceAddress>::min();
  for (const SegmentView& segment : allocator.MemoryMap()) {
    ASSERT_GE(segment.address, previous_end) << "segments overlap";
    DeviceAddress at = segment.address;
    for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
      const BlockView& block = segment.blocks[i];
      ASSERT_EQ(block.address, at) << "a gap or an overlap";
      ASSERT_GT(block.size_bytes.value, 0);
      ASSERT_EQ(block.size_bytes.value % 512, 0);
      at += block.size_bytes.value;
      const bool idle = block.state == BlockState::kFree || block.state == BlockState::kUnmapped;
      if (i > 0 && idle) {
        ASSERT_NE(segment.blocks[i - 1].state, block.state) << "neighbours not merged";
      }
      if (block.state != BlockState::kUnmapped) reserved += block.size_bytes.value;
      if (block.state == BlockState::kAllocated) allocated += block.size_bytes.value;
      if (!idle) {
        active += block.size_bytes.value;
        ASSERT_LE(block.requested_bytes, block.size_bytes);
      }
      const bool split = segment.blocks.size() > 1 && !segment.expandable;
      if (block.state == BlockState::kFree && split) inactive_split += block.size_bytes.value;
      if (block.state == BlockState::kUnmapped) {
        ASSERT_TRUE(segment.expandable);
      }
    }
    ASSERT_EQ(at, segment.address + segment.size_bytes.value);
    previous_end = at;
  }
  ASSERT_EQ(reserved, allocator.stats().reserved_bytes.value);
  ASSERT_EQ(allocated, allocator.stats().allocated_bytes.value);
  ASSERT_EQ(active, allocator.stats().active_bytes.value);
  ASSERT_EQ(inactive_split, allocator.stats().inactive_split_bytes.value);
}

}  // namespace shardplan
