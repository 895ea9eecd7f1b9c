// SPDX-License-Identifier: Apache-2.0
// The proof against races by definition, and each of its rules by hand.
#include "shardplan/races/races.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <variant>
#include <vector>

#include "tests/schemas/races/naive_races.h"
#include "tests/schemas/races/random_recordings.h"

namespace shardplan {
namespace {

using test::BytesOf;

// Bytes that both events touch, one of them writing.
std::set<std::int64_t> BytesInConflict(const Recording& recording, std::int64_t first, std::int64_t second) {
  const auto touched = [&](std::int64_t number, bool writes) {
    std::set<std::int64_t> bytes;
    const auto add = [&](const std::vector<MemoryRegion>& regions) {
      for (const MemoryRegion& region : regions) bytes.merge(BytesOf(region));
    };
    std::visit(
        [&](const auto& event) {
          if constexpr (requires { event.reads; }) {
            if (!writes) add(event.reads);
          }
          if constexpr (requires { event.writes; }) add(event.writes);
        },
        recording.events[static_cast<std::size_t>(number)]);
    return bytes;
  };
  std::set<std::int64_t> both;
  for (const bool writes : {false, true}) {
    const std::set<std::int64_t> a = touched(first, writes), b = touched(second, !writes);
    std::ranges::set_intersection(a, b, std::inserter(both, both.end()));
  }
  return both;
}

// Two accesses to a byte that race are found, but for those that another race on the byte hides.
TEST(Races, AreThoseByDefinition) {
  constexpr std::uint64_t kSeeds = 4000;
  std::size_t clean = 0, found = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Recording recording = test::RandomRaces(seed, 4 + seed % 24);
    const test::NaiveRaces expected = test::FindNaively(recording);
    const RaceReport report = FindRaces(recording);
    std::set<std::int64_t> bytes;
    for (const Race& race : report.races) {
      if (race.kind == RaceKind::kFreedEarly) continue;
      ASSERT_TRUE(expected.pairs.contains({race.first.event, race.second.event}))
          << "seed " << seed << "\n"
          << RaceText(recording, report, 0);
      const std::set<std::int64_t> both = BytesInConflict(recording, race.first.event, race.second.event);
      bytes.insert(both.begin(), both.end());
    }
    const bool any =
        std::ranges::any_of(report.races, [](const Race& r) { return r.kind != RaceKind::kFreedEarly; });
    ASSERT_EQ(any, !expected.pairs.empty()) << "seed " << seed;
    for (const std::int64_t byte : expected.bytes) {
      ASSERT_TRUE(bytes.contains(byte)) << "seed " << seed << ", byte " << byte;
    }
    any ? ++found : ++clean;
  }
  EXPECT_GT(found, kSeeds / 10);
  EXPECT_GT(clean, kSeeds / 10);
}

MemoryRegion At(std::int64_t address, std::int64_t bytes = 4) {
  return {.address = address, .dtype = DType::kUInt8, .shape = {bytes}, .strides = {}};
}

class Scene {
 public:
  Scene() {
    recording_.threads = {{"main", -1}, {"pt_autograd_0", 0}, {"watchdog", -1}};
    recording_.streams = {{0, 0}, {0, 0}, {0, 0}};
  }
  Scene& Write(RecordedId stream, std::int64_t address, RecordedId thread = 0) {
    return Add(IssuedMemset{thread, -1, stream, {At(address)}});
  }
  Scene& Read(RecordedId stream, std::int64_t address, RecordedId thread = 0) {
    return Add(IssuedKernel{thread, -1, stream, "read", {At(address)}, {}, 0});
  }
  Scene& Record(RecordedId stream, std::int64_t event) { return Add(IssuedRecord{0, -1, stream, event}); }
  Scene& Wait(RecordedId stream, std::int64_t event) { return Add(IssuedWait{0, -1, stream, event}); }
  Scene& Allocate(RecordedId stream, std::int64_t address, std::int64_t bytes = 4) {
    return Add(BlockAllocated{0, -1, stream, address, Bytes{bytes}});
  }
  Scene& Free(std::int64_t address, RecordedId thread = 0) {
    return Add(BlockFreed{thread, -1, address, Bytes{4}});
  }
  Scene& Add(RecordingEvent event) {
    recording_.events.push_back(std::move(event));
    return *this;
  }
  std::vector<RaceKind> Kinds() const {
    std::vector<RaceKind> kinds;
    for (const Race& race : FindRaces(recording_).races) kinds.push_back(race.kind);
    return kinds;
  }

 private:
  Recording recording_;
};

using Kinds = std::vector<RaceKind>;

TEST(Races, AnEventOrdersWhatIsBeforeItsRecordAlone) {
  EXPECT_EQ(Scene().Write(0, 0).Record(0, 0).Wait(1, 0).Read(1, 0).Kinds(), Kinds{});
  EXPECT_EQ(Scene().Record(0, 0).Write(0, 0).Wait(1, 0).Read(1, 0).Kinds(), Kinds{RaceKind::kUnordered});
  EXPECT_EQ(Scene().Write(0, 0).Record(0, 0).Read(1, 0).Wait(1, 0).Kinds(), Kinds{RaceKind::kUnordered});
}

TEST(Races, OrderIsPassedOnByAThirdStream) {
  EXPECT_EQ(Scene().Write(0, 0).Record(0, 0).Wait(2, 0).Record(2, 1).Wait(1, 1).Read(1, 0).Kinds(), Kinds{});
}

TEST(Races, TwoReadsDoNotRace) { EXPECT_EQ(Scene().Read(0, 0).Read(1, 0).Kinds(), Kinds{}); }

TEST(Races, TheHostsWaitOrdersWhatItsThreadIssuesThen) {
  EXPECT_EQ(Scene().Write(0, 0).Add(HostWaitForStream{0, -1, 0}).Read(1, 0).Kinds(), Kinds{});
  EXPECT_EQ(Scene().Write(0, 0).Add(HostWaitForStream{2, -1, 0}).Read(1, 0).Kinds(),
            Kinds{RaceKind::kUnordered});
  // autograd's thread works for the main one, both ways.
  EXPECT_EQ(Scene().Write(0, 0).Add(HostWaitForStream{1, -1, 0}).Read(1, 0, 0).Kinds(), Kinds{});
  EXPECT_EQ(Scene().Write(0, 0).Add(HostWaitForStream{0, -1, 0}).Read(1, 0, 1).Kinds(), Kinds{});
}

TEST(Races, WhatTorchLearnsOrdersNoWork) {
  EXPECT_EQ(Scene().Write(0, 0).Record(0, 0).Add(HostLearned{0, 0}).Read(1, 0).Kinds(),
            Kinds{RaceKind::kUnordered});
  EXPECT_EQ(Scene().Write(0, 0).Record(0, 0).Add(HostWaitForEvent{0, -1, 0}).Read(1, 0).Kinds(), Kinds{});
}

TEST(Races, AThreadLearnsOfAnotherWhatIsHandedOver) {
  const auto scene = [] { return Scene().Write(0, 0).Add(HostWaitForStream{2, -1, 0}); };
  EXPECT_EQ(scene().Add(HandOver{2, 7}).Add(TakeOver{0, 7}).Read(1, 0).Kinds(), Kinds{});
  EXPECT_EQ(scene().Add(TakeOver{0, 7}).Add(HandOver{2, 7}).Read(1, 0).Kinds(), Kinds{RaceKind::kUnordered});
}

TEST(Races, ABlockIsReusedWhileAnotherStreamReads) {
  const auto scene = [] { return Scene().Allocate(0, 0).Write(0, 0).Record(0, 0).Wait(1, 0).Read(1, 0); };
  EXPECT_EQ(scene().Free(0).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{RaceKind::kReused});
  // record_stream
  EXPECT_EQ(scene().Free(0).Add(BlockHeld{0, 1, 0}).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{});
  EXPECT_EQ(scene().Free(0).Add(BlockHeld{0, 2, 0}).Allocate(0, 0).Write(0, 0).Kinds(),
            Kinds{RaceKind::kReused});
  // Its own stream waits before it is freed.
  EXPECT_EQ(scene().Record(1, 1).Wait(0, 1).Free(0).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{});
  // A watchdog that has learned that the reading is over frees it.
  EXPECT_EQ(scene().Record(1, 1).Add(HostLearned{2, 1}).Free(0, 2).Allocate(0, 0).Write(0, 0).Kinds(),
            Kinds{});
}

// An answer does not stay: on another day it is "not yet".
TEST(Races, WhatTorchHasLearnedIsForgottenByTheNextWork) {
  const auto scene = [] {
    return Scene().Allocate(0, 0).Write(0, 0).Record(0, 0).Wait(1, 0).Read(1, 0).Record(1, 1).Add(
        HostLearned{0, 1});
  };
  EXPECT_EQ(scene().Free(0).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{});
  EXPECT_EQ(scene().Write(2, 64).Free(0).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{RaceKind::kReused});
}

TEST(Races, TheAllocatorOfPinnedMemoryAsksForTheEventBehindItsCopy) {
  const auto scene = [](bool at_once) {
    Scene made;
    made.Add(MemoryReserved{0, Bytes{64}, -1});
    made.Add(IssuedCopy{0, -1, 0, CopyDirection::kHostToDevice, Bytes{4}, {At(0)}, {At(1000)}});
    if (!at_once) made.Write(0, 2000);
    return made.Record(0, 0)
        .Add(HostLearned{0, 0})
        .Write(2, 3000)
        .Add(HostOperator{0, -1, "fill_", {}, {At(0)}});
  };
  EXPECT_EQ(scene(true).Kinds(), Kinds{});
  EXPECT_EQ(scene(false).Kinds(), Kinds{RaceKind::kHost});
}

// The block's own stream is behind its last owner; another one that the next owner uses need not be.
TEST(Races, ANextOwnerOnAnotherStreamIsNotBehindTheBlocksOwn) {
  const auto scene = [] { return Scene().Allocate(0, 0).Write(0, 0).Free(0).Allocate(0, 0); };
  EXPECT_EQ(scene().Write(1, 0).Kinds(), Kinds{RaceKind::kReused});
  EXPECT_EQ(scene().Record(0, 0).Wait(1, 0).Write(1, 0).Kinds(), Kinds{});
}

TEST(Races, TheAllocatorOfPinnedMemoryTellsEveryThread) {
  const auto scene = [] {
    Scene made;
    made.Add(MemoryReserved{0, Bytes{64}, -1});
    return made.Add(IssuedCopy{0, -1, 0, CopyDirection::kHostToDevice, Bytes{4}, {At(0)}, {At(1000)}});
  };
  const HostOperator fill{2, -1, "fill_", {}, {At(0)}};
  EXPECT_EQ(scene().Record(0, 0).Add(HostLearned{0, 0}).Add(fill).Kinds(), Kinds{});
  EXPECT_EQ(scene().Add(HostWaitForStream{0, -1, 0}).Add(fill).Kinds(), Kinds{});
  EXPECT_EQ(scene().Add(fill).Kinds(), Kinds{RaceKind::kHost});
}

TEST(Races, TheNextOwnerMayBeAnotherBlockInAnotherRun) {
  const auto scene = [] { return Scene().Allocate(0, 0).Write(0, 0).Record(0, 0).Wait(1, 0).Read(1, 0); };
  EXPECT_EQ(scene().Free(0).Allocate(0, 64).Write(0, 64).Kinds(), Kinds{RaceKind::kFreedEarly});
  // Handed out for another stream: never this block.
  EXPECT_EQ(scene().Free(0).Allocate(2, 64).Write(2, 64).Kinds(), Kinds{});
  // The owner's first access is behind the reading.
  EXPECT_EQ(scene().Free(0).Allocate(0, 64).Record(1, 1).Wait(0, 1).Write(0, 64).Kinds(), Kinds{});
  // A large block is never made of a small one.
  EXPECT_EQ(scene().Free(0).Allocate(0, 64, 4 << 20).Write(0, 64).Kinds(), Kinds{});
  // Nobody is the next owner.
  EXPECT_EQ(scene().Free(0).Kinds(), Kinds{});
}

// Its memory may be handed out again before anybody has touched it.
TEST(Races, WhatABlockWasHeldForIsOverForEveryLaterOwner) {
  const auto scene = [] {
    return Scene().Allocate(0, 0).Write(0, 0).Record(0, 0).Wait(1, 0).Read(1, 0).Free(0);
  };
  const auto held = [&] { return scene().Add(BlockHeld{0, 1, 0}).Allocate(0, 0).Free(0); };
  EXPECT_EQ(held().Allocate(0, 0).Write(0, 0).Kinds(), Kinds{});
  EXPECT_EQ(held().Allocate(0, 64).Write(0, 64).Kinds(), Kinds{});
  EXPECT_EQ(scene().Allocate(0, 0).Free(0).Allocate(0, 0).Write(0, 0).Kinds(), Kinds{RaceKind::kReused});
}

TEST(Races, TheHostReadsWhatADeviceStillWrites) {
  const auto scene = [] {
    return Scene()
        .Add(MemoryReserved{0, Bytes{64}, -1})
        .Add(IssuedCopy{0, -1, 0, CopyDirection::kDeviceToHost, Bytes{4}, {}, {At(0)}});
  };
  const HostOperator read{0, -1, "sum", {At(0)}, {}};
  EXPECT_EQ(scene().Add(read).Kinds(), Kinds{RaceKind::kHost});
  EXPECT_EQ(scene().Add(HostWaitForStream{0, -1, 0}).Add(read).Kinds(), Kinds{});
  EXPECT_EQ(scene().Add(HostWaitForStream{0, -1, 1}).Add(read).Kinds(), Kinds{RaceKind::kHost});
}

TEST(Races, MemoryThatIsGivenBackIsForgotten) {
  EXPECT_EQ(Scene()
                .Add(MemoryReserved{0, Bytes{64}, 0})
                .Write(0, 0)
                .Add(MemoryReleased{0, 0})
                .Add(MemoryReserved{0, Bytes{64}, 0})
                .Write(1, 0)
                .Kinds(),
            Kinds{});
}

TEST(Races, KernelsWhoseMemoryIsNotKnownAreCounted) {
  Recording recording;
  recording.threads = {{"main", -1}};
  recording.streams = {{0, 0}};
  recording.events = {IssuedLaunch{0, -1, 0, "b"}, IssuedLaunch{0, -1, 0, "a"}, IssuedLaunch{0, -1, 0, "b"}};
  const RaceReport report = FindRaces(recording);
  EXPECT_EQ(report.unknown_launches, 3);
  EXPECT_EQ(report.unknown_kernels, (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace shardplan
