// SPDX-License-Identifier: Apache-2.0
// Each rule that needs no driver: size classes, best fit, splitting, merging, streams, deferred frees.
#include "allocator_fixture.h"

namespace shardplan {
namespace {

TEST(Rules, SizesAreRoundedTo512) {
  TestAllocator test;
  EXPECT_EQ(test.Size(test.Allocate(1)), 512);
  EXPECT_EQ(test.Size(test.Allocate(512)), 512);
  EXPECT_EQ(test.Size(test.Allocate(513)), 1024);
  EXPECT_EQ(test.allocator.stats().requested_bytes.value, 1 + 512 + 513);
  EXPECT_EQ(test.allocator.stats().allocated_bytes.value, 2048);
}

TEST(Rules, ARequestOfNothingOccupiesNothing) {
  TestAllocator test;
  const BlockId block = test.Allocate(0);
  EXPECT_EQ(block, kEmptyBlock);
  test.Free(block);
  EXPECT_EQ(test.Reserved(), 0);
}

TEST(Rules, SegmentsBySizeOfRequest) {
  const std::pair<std::int64_t, std::int64_t> cases[] = {{1, 2 * kMiB},
                                                         {kMiB, 2 * kMiB},
                                                         {kMiB + 1, 20 * kMiB},
                                                         {10 * kMiB - 512, 20 * kMiB},
                                                         {10 * kMiB, 10 * kMiB},
                                                         {10 * kMiB + 1, 12 * kMiB},
                                                         {12 * kMiB, 12 * kMiB},
                                                         {12 * kMiB + 1, 14 * kMiB},
                                                         {10 * kMiB - 511, 10 * kMiB}};
  for (const auto& [request, segment] : cases) {
    TestAllocator test;
    test.Allocate(request);
    EXPECT_EQ(test.Reserved(), segment) << request;
    ASSERT_EQ(test.Actions().size(), 1U);
    EXPECT_EQ(test.Actions()[0].kind, SegmentActionKind::kSegmentAlloc);
    EXPECT_EQ(test.Actions()[0].size_bytes.value, segment);
  }
}

TEST(Rules, SmallPoolSplitsDownTo512) {
  TestAllocator test;
  const BlockId first = test.Allocate(kMiB);
  const BlockId second = test.Allocate(kMiB - 512);
  EXPECT_EQ(test.Address(second), test.Address(first) + kMiB);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{kMiB, kMiB - 512, -512}));
  const BlockId third = test.Allocate(100);
  EXPECT_EQ(test.Address(third), test.Address(first) + 2 * kMiB - 512);
  EXPECT_EQ(test.Reserved(), 2 * kMiB);
}

TEST(Rules, LargePoolSplitsOnlyWhenMoreThanOneMiBRemains) {
  TestAllocator splits;
  splits.Allocate(11 * kMiB - 512);  // 12 MiB segment, 1 MiB + 512 remain
  EXPECT_EQ(splits.Blocks(), (std::vector<std::int64_t>{11 * kMiB - 512, -(kMiB + 512)}));
  TestAllocator keeps;
  keeps.Allocate(11 * kMiB);  // exactly 1 MiB remains
  EXPECT_EQ(keeps.Blocks(), (std::vector<std::int64_t>{12 * kMiB}));
}

TEST(Rules, PoolsDoNotMix) {
  TestAllocator test;
  test.Free(test.Allocate(20 * kMiB));
  test.Allocate(kMiB);
  EXPECT_EQ(test.Reserved(), 22 * kMiB) << "a small request never uses a large segment";
  test.Free(test.Allocate(2 * kMiB));
  EXPECT_EQ(test.Reserved(), 22 * kMiB) << "a large one uses the cached large segment";
}

TEST(Rules, StreamsDoNotShare) {
  TestAllocator test;
  const BlockId first = test.Allocate(4 * kMiB, 0);
  const DeviceAddress address = test.Address(first);
  test.Free(first);
  EXPECT_NE(test.Address(test.Allocate(4 * kMiB, 1)), address);
  EXPECT_EQ(test.Reserved(), 40 * kMiB);
  EXPECT_EQ(test.Address(test.Allocate(4 * kMiB, 0)), address);
  EXPECT_EQ(test.Reserved(), 40 * kMiB);
}

TEST(Rules, BestFitTakesTheSmallestThatIsLargeEnough) {
  TestAllocator test;
  const BlockId large = test.Allocate(64 * kMiB), middle = test.Allocate(32 * kMiB),
                tight = test.Allocate(16 * kMiB);
  const DeviceAddress expected = test.Address(middle);
  for (const BlockId block : {large, middle, tight}) test.Free(block);
  EXPECT_EQ(test.Address(test.Allocate(17 * kMiB)), expected);
}

TEST(Rules, AmongEqualSizesTheLowestAddress) {
  TestAllocator test;
  std::vector<BlockId> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(test.Allocate(16 * kMiB));
  const DeviceAddress lowest = test.Address(blocks[1]);
  test.Free(blocks[3]);
  test.Free(blocks[1]);
  test.Free(blocks[4]);
  EXPECT_EQ(test.Address(test.Allocate(15 * kMiB)), lowest);
}

// All orders in which three neighbours can be freed.
TEST(Rules, FreedNeighboursMerge) {
  std::vector<int> order = {0, 1, 2};
  do {
    TestAllocator test;
    std::vector<BlockId> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(test.Allocate(2 * kMiB));
    for (const int i : order) {
      test.Free(blocks[static_cast<std::size_t>(i)]);
      CheckInvariants(test.allocator);
    }
    EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{-20 * kMiB}));
    EXPECT_EQ(test.allocator.stats().inactive_split_bytes.value, 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Rules, AFreedBlockBetweenLiveOnesStaysApart) {
  TestAllocator test;
  const BlockId first = test.Allocate(2 * kMiB), second = test.Allocate(3 * kMiB);
  test.Allocate(4 * kMiB);
  test.Free(second);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{2 * kMiB, -3 * kMiB, 4 * kMiB, -11 * kMiB}));
  EXPECT_EQ(test.allocator.stats().inactive_split_bytes.value, 14 * kMiB);
  test.Free(first);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{-5 * kMiB, 4 * kMiB, -11 * kMiB}));
}

TEST(Rules, FreedMemoryStaysReservedUntilTheCacheIsEmptied) {
  TestAllocator test;
  const BlockId kept = test.Allocate(2 * kMiB), whole = test.Allocate(30 * kMiB), small = test.Allocate(100);
  test.Free(whole);
  test.Free(small);
  EXPECT_EQ(test.Reserved(), 52 * kMiB);
  test.allocator.ReleaseCached(test.device);
  EXPECT_EQ(test.Reserved(), 20 * kMiB) << "a segment in use stays";
  ASSERT_EQ(test.Actions().size(), 2U);
  EXPECT_EQ(test.Actions()[0].size_bytes.value, 30 * kMiB) << "the large pool first";
  EXPECT_EQ(test.Actions()[1].size_bytes.value, 2 * kMiB);
  test.Free(kept);
  test.allocator.ReleaseCached(test.device);
  EXPECT_EQ(test.Reserved(), 0);
  EXPECT_EQ(test.device.FreeMemory().value, 8 * kGiB);
}

TEST(RecordStream, TheBlockStaysActiveUntilItsEventCompletes) {
  TestAllocator test;
  const BlockId block = test.Allocate(16 * kMiB);
  const DeviceAddress address = test.Address(block);
  test.allocator.RecordStream(block, 1);
  test.Free(block);
  EXPECT_EQ(test.allocator.stats().allocated_bytes.value, 0);
  EXPECT_EQ(test.allocator.stats().active_bytes.value, 16 * kMiB);
  EXPECT_EQ(test.allocator.RecordedEvents(1), 1);
  const BlockId other = test.Allocate(16 * kMiB);
  EXPECT_NE(test.Address(other), address);
  test.allocator.CompleteEvents(1, 1);
  EXPECT_EQ(test.allocator.stats().active_bytes.value, 32 * kMiB) << "noticed at the next request only";
  EXPECT_EQ(test.Address(test.Allocate(16 * kMiB)), address);
  EXPECT_EQ(test.Reserved(), 32 * kMiB);
}

TEST(RecordStream, OfItsOwnStreamIsIgnored) {
  TestAllocator test;
  const BlockId block = test.Allocate(16 * kMiB, 2);
  test.allocator.RecordStream(block, 2);
  test.Free(block);
  EXPECT_EQ(test.allocator.stats().active_bytes.value, 0);
}

TEST(RecordStream, WaitsForEveryStreamOnce) {
  TestAllocator test;
  const BlockId block = test.Allocate(16 * kMiB);
  for (const std::int32_t stream : {3, 1, 3}) test.allocator.RecordStream(block, stream);
  test.Free(block);
  EXPECT_EQ(test.allocator.RecordedEvents(3), 1);
  test.allocator.CompleteEvents(3, 1);
  test.Allocate(1);
  EXPECT_EQ(test.allocator.stats().active_bytes.value, 16 * kMiB + 512);
  test.allocator.CompleteEvents(1, 1);
  test.Allocate(1);
  EXPECT_EQ(test.allocator.stats().active_bytes.value, 1024);
}

TEST(RecordStream, AWaitingBlockDoesNotMergeWithItsNeighbours) {
  TestAllocator test;
  const BlockId first = test.Allocate(2 * kMiB), second = test.Allocate(2 * kMiB);
  test.allocator.RecordStream(first, 1);
  test.Free(first);
  test.Free(second);
  EXPECT_EQ(test.Blocks(), (std::vector<std::int64_t>{2 * kMiB, -18 * kMiB}));
  test.allocator.ReleaseCached(test.device);
  EXPECT_EQ(test.Reserved(), 0) << "emptying the cache waits for the event";
}

TEST(MemoryMap, AsText) {
  TestAllocator test;
  const BlockId first = test.Allocate(5 * kMiB);
  const BlockId second = test.Allocate(5 * kMiB);
  test.allocator.RecordStream(second, 1);
  test.Free(second);
  const std::string text = AsciiMemoryMap(test.allocator.MemoryMap(), 8);
  EXPECT_EQ(text, "0x100000000 stream 0 large 10485760 of 20971520 B |##ww....|\n");
  test.Free(first);
}

}  // namespace
}  // namespace shardplan
