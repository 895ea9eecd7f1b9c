// SPDX-License-Identifier: Apache-2.0
// Each rule about the driver: out of memory, max_split_size, garbage collection, rounding divisions.
#include "allocator_fixture.h"

namespace shardplan {
namespace {

TEST(OutOfMemory, ReleasesTheCacheAndTriesAgain) {
  TestAllocator test({}, {64 * kMiB});
  const BlockId kept = test.Allocate(2 * kMiB);
  test.Free(test.Allocate(20 * kMiB, 1));
  test.Free(test.Allocate(100));
  EXPECT_EQ(test.Reserved(), 42 * kMiB);
  EXPECT_NE(test.Allocate(40 * kMiB), kNoBlock);
  ASSERT_EQ(test.Actions().size(), 3U);
  EXPECT_EQ(test.Actions()[0].kind, SegmentActionKind::kSegmentFree);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 20 * kMiB);
  EXPECT_EQ(test.Actions()[1].size_bytes.value, 2 * kMiB);
  EXPECT_EQ(test.Actions()[2].kind, SegmentActionKind::kSegmentAlloc);
  EXPECT_EQ(test.allocator.stats().retries, 1);
  EXPECT_EQ(test.allocator.stats().ooms, 0);
  test.Free(kept);
}

TEST(OutOfMemory, IsTheAnswerWhenNothingHelps) {
  TestAllocator test({}, {64 * kMiB});
  test.Allocate(40 * kMiB);
  EXPECT_EQ(test.Allocate(40 * kMiB), kNoBlock);
  EXPECT_EQ(test.allocator.stats().ooms, 1);
  EXPECT_EQ(test.Reserved(), 40 * kMiB);
  EXPECT_NE(test.Allocate(20 * kMiB), kNoBlock) << "a smaller one still fits";
  CheckInvariants(test.allocator);
}

TEST(OutOfMemory, WaitsForEvents) {
  TestAllocator test({}, {64 * kMiB});
  const BlockId block = test.Allocate(40 * kMiB);
  test.allocator.RecordStream(block, 1);
  test.Free(block);
  EXPECT_NE(test.Allocate(60 * kMiB), kNoBlock);
}

TEST(OutOfMemory, AtWhatTheProcessIsAllowed) {
  AllocatorSettings settings;
  settings.allowed_bytes = Bytes{50 * kMiB};
  TestAllocator test(settings);
  test.Free(test.Allocate(30 * kMiB));
  EXPECT_NE(test.Allocate(31 * kMiB), kNoBlock) << "after the cached 30 MiB are released";
  EXPECT_EQ(test.Allocate(20 * kMiB), kNoBlock);
  EXPECT_EQ(test.Reserved(), 32 * kMiB);
}

AllocatorSettings MaxSplit(std::int64_t mebibytes) {
  AllocatorSettings settings;
  settings.max_split_size_bytes = Bytes{mebibytes * kMiB};
  return settings;
}

TEST(MaxSplitSize, OversizeBlocksAreNotSplit) {
  TestAllocator test(MaxSplit(32));
  const BlockId block = test.Allocate(40 * kMiB);
  const DeviceAddress address = test.Address(block);
  test.Free(block);
  const BlockId again = test.Allocate(33 * kMiB);
  EXPECT_EQ(test.Address(again), address);
  EXPECT_EQ(test.Size(again), 40 * kMiB);
}

TEST(MaxSplitSize, ASmallerRequestDoesNotGetAnOversizeBlock) {
  TestAllocator test(MaxSplit(32));
  test.Free(test.Allocate(40 * kMiB));
  test.Allocate(20 * kMiB);
  EXPECT_EQ(test.Reserved(), 60 * kMiB);
}

TEST(MaxSplitSize, AnOversizeRequestGetsABlockThatIsLittleLarger) {
  for (const std::int64_t slack : {20 * kMiB - 2 * kMiB, 20 * kMiB}) {
    TestAllocator test(MaxSplit(32));
    test.Free(test.Allocate(40 * kMiB + slack));
    test.Allocate(40 * kMiB);
    EXPECT_EQ(test.Reserved(), slack < 20 * kMiB ? 40 * kMiB + slack : 80 * kMiB + slack) << slack;
  }
}

TEST(MaxSplitSize, OutOfMemoryReleasesTheSmallestOversizeBlockThatIsEnough) {
  TestAllocator test(MaxSplit(32), {400 * kMiB});
  const BlockId blocks[] = {test.Allocate(100 * kMiB), test.Allocate(140 * kMiB), test.Allocate(40 * kMiB),
                            test.Allocate(20 * kMiB)};
  for (const BlockId block : blocks) test.Free(block);
  ASSERT_EQ(test.Reserved(), 300 * kMiB);
  test.Allocate(110 * kMiB);
  ASSERT_EQ(test.Actions().size(), 2U);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 140 * kMiB);
  EXPECT_EQ(test.allocator.stats().retries, 0) << "the rest of the cache is kept";
}

TEST(MaxSplitSize, OrSeveralTheLargestFirst) {
  TestAllocator test(MaxSplit(32), {400 * kMiB});
  const BlockId blocks[] = {test.Allocate(100 * kMiB), test.Allocate(140 * kMiB), test.Allocate(40 * kMiB),
                            test.Allocate(20 * kMiB)};
  for (const BlockId block : blocks) test.Free(block);
  test.Allocate(200 * kMiB);
  ASSERT_EQ(test.Actions().size(), 3U);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 140 * kMiB);
  EXPECT_EQ(test.Actions()[1].size_bytes.value, 100 * kMiB);
  EXPECT_EQ(test.Reserved(), 260 * kMiB);
}

AllocatorSettings Collecting(double threshold, std::int64_t allowed) {
  AllocatorSettings settings;
  settings.garbage_collection_threshold = threshold;
  settings.allowed_bytes = Bytes{allowed};
  return settings;
}

// 20 MiB are cached, and four segments are freed with a search of the large pool after each. At the next
// miss, a search itself, they were free for 5, 4, 3 and 2 searches, the 20 MiB for 1: 3 on average. 232 MiB
// are reserved, 200 MiB may be before collection.
TEST(GarbageCollection, ReleasesSegmentsOfAverageAgeAndOlder) {
  TestAllocator test(Collecting(0.5, 400 * kMiB));
  test.Free(test.Allocate(2 * kMiB));
  std::vector<BlockId> blocks;
  for (const std::int64_t size : {56, 50, 54, 52}) blocks.push_back(test.Allocate(size * kMiB));
  for (const BlockId block : blocks) {
    test.Free(block);
    test.Free(test.Allocate(2 * kMiB));
  }
  ASSERT_EQ(test.Reserved(), 232 * kMiB);
  test.Allocate(60 * kMiB);
  std::vector<std::int64_t> sizes;
  for (const SegmentAction& action : test.Actions()) {
    const bool freed = action.kind == SegmentActionKind::kSegmentFree;
    sizes.push_back(freed ? -action.size_bytes.value / kMiB : action.size_bytes.value / kMiB);
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{-50, -54, -56, 60})) << "by size, as the free list has them";
  EXPECT_EQ(test.Reserved(), 132 * kMiB);
}

TEST(GarbageCollection, NeedsALimit) {
  AllocatorSettings settings;
  settings.garbage_collection_threshold = 0.01;
  TestAllocator test(settings);
  test.Free(test.Allocate(100 * kMiB));
  test.Allocate(200 * kMiB);
  EXPECT_EQ(test.Reserved(), 300 * kMiB);
}

TEST(GarbageCollection, KeepsEverythingBelowTheThreshold) {
  TestAllocator test(Collecting(0.5, 400 * kMiB));
  test.Free(test.Allocate(200 * kMiB));
  test.Allocate(200 * kMiB + 1);
  EXPECT_EQ(test.allocator.stats().device_frees, 1) << "200 MiB is not above; but the limit is then reached";
  EXPECT_EQ(test.allocator.stats().retries, 1);
}

TEST(RoundupDivisions, DivideEachPowerOfTwo) {
  AllocatorSettings settings;
  settings.roundup_power2_divisions.fill(4);
  auto rounded = [&](std::int64_t bytes) { return RoundedSize(settings, {bytes}).value; };
  EXPECT_EQ(rounded(1), 512);
  EXPECT_EQ(rounded(2048), 2048);
  EXPECT_EQ(rounded(2049), 2560) << "2048 / 4";
  EXPECT_EQ(rounded(1200), 1536) << "not above 512 times the divisions: as without";
  EXPECT_EQ(rounded(4096 + 1), 5120);
  EXPECT_EQ(rounded(5120), 5120);
  EXPECT_EQ(rounded(7169), 8192);
  EXPECT_EQ(rounded(kGiB + 1), kGiB + kGiB / 4);
}

TEST(RoundupDivisions, ByIntervals) {
  AllocatorSettings settings;
  settings.roundup_power2_divisions[1] = 2;   // 2 to 4 MiB
  settings.roundup_power2_divisions[15] = 8;  // from 32 GiB
  auto rounded = [&](std::int64_t bytes) { return RoundedSize(settings, {bytes}).value; };
  EXPECT_EQ(rounded(2 * kMiB - 511), 2 * kMiB);
  EXPECT_EQ(rounded(2 * kMiB + 1), 3 * kMiB);
  EXPECT_EQ(rounded(4 * kMiB + 1), 4 * kMiB + 512);
  EXPECT_EQ(rounded(64 * kGiB + 1), 72 * kGiB);
}

}  // namespace
}  // namespace shardplan
