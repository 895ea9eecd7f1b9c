// SPDX-License-Identifier: Apache-2.0
// Expandable segments: address space that is mapped page by page.
#include "allocator_fixture.h"

namespace shardplan {
namespace {

AllocatorSettings Expandable() {
  AllocatorSettings settings;
  settings.expandable_segments = true;
  return settings;
}

TEST(Expandable, GrowsByPagesOfItsPool) {
  TestAllocator test(Expandable());
  test.Allocate(100);
  ASSERT_EQ(test.Actions().size(), 1U);
  EXPECT_EQ(test.Actions()[0].kind, SegmentActionKind::kSegmentMap);
  EXPECT_EQ(test.Reserved(), 2 * kMiB);
  test.Allocate(3 * kMiB);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 20 * kMiB);
  test.Allocate(50 * kMiB);  // 17 MiB are free at the end: 33 missing, two pages
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 40 * kMiB);
  EXPECT_EQ(test.Reserved(), 62 * kMiB);
  EXPECT_EQ(test.allocator.MemoryMap().size(), 2U);
}

TEST(Expandable, SplitsDownTo512InTheLargePool) {
  TestAllocator test(Expandable());
  test.Allocate(20 * kMiB - 512);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{20 * kMiB - 512, -512}));
  EXPECT_EQ(test.allocator.stats().inactive_split_bytes.value, 0) << "pages can be released: not counted";
}

TEST(Expandable, ReservesNineEighthsOfTheDevice) {
  TestAllocator test(Expandable(), {160 * kMiB});
  test.Allocate(2 * kMiB);
  EXPECT_EQ(test.allocator.MemoryMap().at(0).size_bytes.value, 180 * kMiB);
}

TEST(Expandable, PrefersAHoleToTheGrowingEnd) {
  TestAllocator test(Expandable());
  const BlockId hole = test.Allocate(30 * kMiB);
  test.Allocate(2 * kMiB);
  const DeviceAddress address = test.Address(hole);
  test.Free(hole);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{-30 * kMiB, 2 * kMiB, -8 * kMiB}));
  // 8 MiB would be the best fit by size; it could grow, and counts as larger than the hole.
  EXPECT_EQ(test.Address(test.Allocate(4 * kMiB)), address);
}

TEST(Expandable, EmptyingTheCacheUnmapsWholePages) {
  TestAllocator test(Expandable());
  const BlockId first = test.Allocate(50 * kMiB);
  const BlockId second = test.Allocate(2 * kMiB);
  test.Free(first);
  test.allocator.ReleaseCached(test.device);
  ASSERT_EQ(test.Actions().size(), 1U);
  EXPECT_EQ(test.Actions()[0].kind, SegmentActionKind::kSegmentUnmap);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 40 * kMiB) << "the third page holds the other block";
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{-10 * kMiB, 2 * kMiB, -8 * kMiB}));
  CheckInvariants(test.allocator);
  // The gap is filled before the end grows.
  const DeviceAddress begin = test.allocator.MemoryMap().at(0).address;
  EXPECT_EQ(test.Address(test.Allocate(45 * kMiB)), begin);
  EXPECT_EQ(test.Reserved(), 60 * kMiB);
  CheckInvariants(test.allocator);
  test.Free(second);
}

TEST(Expandable, AnEmptyAddressSpaceIsGivenBack) {
  TestAllocator test(Expandable());
  test.Free(test.Allocate(50 * kMiB));
  test.allocator.ReleaseCached(test.device);
  EXPECT_TRUE(test.allocator.MemoryMap().empty());
  EXPECT_EQ(test.Reserved(), 0);
  EXPECT_NE(test.Allocate(50 * kMiB), kNoBlock);
}

TEST(Expandable, OutOfMemoryUnmapsAndTriesAgain) {
  TestAllocator test(Expandable(), {160 * kMiB});
  const BlockId first = test.Allocate(60 * kMiB, 0);
  test.Allocate(60 * kMiB, 1);
  test.Free(first);
  EXPECT_NE(test.Allocate(80 * kMiB, 1), kNoBlock);
  EXPECT_EQ(test.allocator.stats().retries, 1);
  EXPECT_EQ(test.Reserved(), 140 * kMiB);
  CheckInvariants(test.allocator);
}

TEST(Expandable, AFailedMapLeavesAConsistentState) {
  TestAllocator test(Expandable(), {100 * kMiB});
  test.Allocate(60 * kMiB);
  EXPECT_EQ(test.Allocate(60 * kMiB), kNoBlock);
  CheckInvariants(test.allocator);
  EXPECT_NE(test.Allocate(40 * kMiB), kNoBlock);
  EXPECT_EQ(test.Reserved(), 100 * kMiB);
}

TEST(Expandable, StreamsHaveTheirOwnAddressSpace) {
  TestAllocator test(Expandable());
  test.Allocate(2 * kMiB, 0);
  test.Allocate(2 * kMiB, 1);
  EXPECT_EQ(test.allocator.MemoryMap().size(), 2U);
}

}  // namespace
}  // namespace shardplan
