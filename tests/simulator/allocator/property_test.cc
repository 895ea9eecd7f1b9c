// SPDX-License-Identifier: Apache-2.0
// Random requests: the model against a naive allocator, and invariants under every setting. The seed is
// printed with each failure.
#include <random>

#include "allocator/free_block_list.h"
#include "allocator_fixture.h"
#include "naive_allocator.h"

namespace shardplan {
namespace {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  // Small, medium, large, and a few sizes that come again and again.
  std::int64_t Size() {
    static constexpr std::int64_t kFavourites[] = {4096,      600 * kKiB, 3 * kMiB,
                                                   10 * kMiB, 33 * kMiB,  33 * kMiB + 1};
    switch (Below(6)) {
      case 0:
        return 1 + Below(4 * kKiB);
      case 1:
        return 1 + Below(kMiB + 1000);
      case 2:
        return 1 + Below(12 * kMiB);
      case 3:
        return 1 + Below(80 * kMiB);
      default:
        return kFavourites[Below(6)];
    }
  }

 private:
  std::mt19937_64 engine_;
};

struct Live {
  BlockId block;
  std::int64_t address;
};

TEST(Property, EqualsTheNaiveAllocator) {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    AllocatorSettings settings;
    NaiveSettings naive_settings;
    if (seed % 3 == 1) {
      naive_settings.max_split = (20 + random.Below(40)) * kMiB;
      settings.max_split_size_bytes = Bytes{naive_settings.max_split};
    }
    naive_settings.capacity = (200 + random.Below(800)) * kMiB;
    TestAllocator test(settings, {naive_settings.capacity});
    NaiveAllocator naive(naive_settings);
    std::vector<Live> live;
    for (int step = 0; step < 400; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const std::int64_t choice = random.Below(100);
      if (choice < 55) {
        const std::int64_t bytes = random.Size();
        const int stream = static_cast<int>(random.Below(2));
        const BlockId block = test.Allocate(bytes, stream);
        const std::optional<std::int64_t> expected = naive.Allocate(bytes, stream);
        ASSERT_EQ(block != kNoBlock, expected.has_value()) << bytes;
        if (block != kNoBlock) {
          ASSERT_EQ(test.Address(block), *expected) << bytes;
          live.push_back({block, *expected});
        }
      } else if (choice < 98 && !live.empty()) {
        const auto at = live.begin() + random.Below(static_cast<std::int64_t>(live.size()));
        test.Free(at->block);
        naive.Free(at->address);
        live.erase(at);
      } else if (choice == 98) {
        test.allocator.ReleaseCached(test.device);
        naive.EmptyCache();
      }
      ASSERT_EQ(test.Reserved(), naive.Reserved());
    }
    CheckInvariants(test.allocator);
  }
}

AllocatorSettings RandomSettings(Random& random, std::int64_t capacity) {
  AllocatorSettings settings;
  settings.expandable_segments = random.Below(2) == 0;
  if (random.Below(2) == 0) settings.max_split_size_bytes = Bytes{(20 + random.Below(60)) * kMiB};
  if (random.Below(3) == 0) settings.roundup_power2_divisions.fill(std::int64_t{1} << random.Below(5));
  if (random.Below(3) == 0) settings.large_segment_bytes = Bytes{(12 + 2 * random.Below(20)) * kMiB};
  if (random.Below(2) == 0) {
    settings.allowed_bytes = Bytes{capacity / 2 + random.Below(capacity / 2)};
    settings.garbage_collection_threshold = 0.3 + 0.1 * static_cast<double>(random.Below(6));
  }
  return settings;
}

TEST(Property, InvariantsHoldUnderEverySetting) {
  for (std::uint32_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::int64_t capacity = (150 + random.Below(600)) * kMiB;
    TestAllocator test(RandomSettings(random, capacity), {capacity});
    std::vector<BlockId> live;
    for (int step = 0; step < 300; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const std::int64_t choice = random.Below(100);
      if (choice < 50) {
        const BlockId block = test.Allocate(random.Size(), static_cast<std::int32_t>(random.Below(3)));
        if (block != kNoBlock) live.push_back(block);
      } else if (choice < 90 && !live.empty()) {
        const auto at = live.begin() + random.Below(static_cast<std::int64_t>(live.size()));
        if (random.Below(3) == 0)
          test.allocator.RecordStream(*at, static_cast<std::int32_t>(random.Below(3)));
        test.Free(*at);
        live.erase(at);
      } else if (choice < 98) {
        const auto stream = static_cast<std::int32_t>(random.Below(3));
        test.allocator.CompleteEvents(stream, random.Below(1 + test.allocator.RecordedEvents(stream)));
      } else if (choice == 98) {
        test.allocator.ReleaseCached(test.device);
      }
      CheckInvariants(test.allocator);
      ASSERT_FALSE(::testing::Test::HasFatalFailure());
      ASSERT_EQ(test.device.FreeMemory().value, capacity - test.Reserved());
    }
    for (const BlockId block : live) test.Free(block);
    test.allocator.ReleaseCached(test.device);
    EXPECT_EQ(test.Reserved(), 0) << "everything can be given back";
    EXPECT_TRUE(test.allocator.MemoryMap().empty());
    EXPECT_EQ(test.allocator.stats().active_bytes.value, 0);
    EXPECT_EQ(test.allocator.stats().requested_bytes.value, 0);
  }
}

// The list behind best fit against a sorted vector, beyond one chunk.
TEST(Property, FreeBlockListIsASortedSequence) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    FreeBlockList list;
    std::vector<std::pair<std::int64_t, std::int64_t>> expected;
    for (int step = 0; step < 4000; ++step) {
      if (expected.size() < 20 || (step < 2500 ? random.Below(4) != 0 : random.Below(4) == 0)) {
        const std::pair<std::int64_t, std::int64_t> entry{512 * random.Below(50),
                                                          512 * random.Below(1'000'000)};
        const auto at = std::lower_bound(expected.begin(), expected.end(), entry);
        if (at != expected.end() && *at == entry) continue;
        expected.insert(at, entry);
        list.Insert({entry.first, 0, entry.second, 0});
      } else {
        const auto at = expected.begin() + random.Below(static_cast<std::int64_t>(expected.size()));
        list.Erase({at->first, 0, at->second, 0});
        expected.erase(at);
      }
      const std::int64_t size = 512 * random.Below(52);
      const auto bound =
          std::lower_bound(expected.begin(), expected.end(), std::pair{size, std::int64_t{-1}});
      const FreeBlockList::Position found = list.LowerBound(size);
      ASSERT_EQ(found == list.end(), bound == expected.end());
      if (bound != expected.end()) {
        ASSERT_EQ(list[found].address, bound->second);
      }
    }
    ASSERT_EQ(list.size(), expected.size());
    std::size_t i = 0;
    for (auto at = list.begin(); at != list.end(); at = list.Next(at)) {
      ASSERT_EQ(list[at].address, expected[i++].second);
    }
    for (auto at = list.end(); at != list.begin();) {
      at = list.Previous(at);
      ASSERT_EQ(list[at].size, expected[--i].first);
    }
  }
}

}  // namespace
}  // namespace shardplan
