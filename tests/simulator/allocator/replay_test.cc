// SPDX-License-Identifier: Apache-2.0
// Recorded logs: one training step on an H100, and random requests to LibTorch 2.11's own allocator under
// various settings over a stand-in driver (data/README.md). Every action must be reproduced; a changed log
// must not be.
#include <filesystem>
#include <random>

#include "allocator_fixture.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

const std::string kData = std::string(SHARDPLAN_SOURCE_DIR) + "/tests/simulator/allocator/data/";

AllocatorLog Read(const std::string& name) {
  Result<AllocatorLog> log = ReadAllocatorLog(kData + name);
  EXPECT_TRUE(log) << name << ": " << (log ? "" : ToString(log.error()));
  return log ? *log : AllocatorLog{};
}

std::string Where(const AllocatorReplay& replay) {
  if (!replay.departure) return "no departure";
  return "action " + std::to_string(replay.departure->action) + ": model " + replay.departure->model +
         ", log " + replay.departure->log;
}

std::vector<std::string> LibTorchLogs() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kData)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("libtorch_")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Replay, OneTrainingStepExactly) {
  const AllocatorLog log = Read("h100_training_step.json");
  ASSERT_EQ(log.actions.size(), 14234U);
  const Result<AllocatorReplay> replay = ReplayAllocatorLog(log);
  ASSERT_TRUE(replay);
  EXPECT_EQ(replay->reproduced, 14234) << Where(*replay);
  EXPECT_FALSE(replay->departure);
  EXPECT_EQ(replay->initial_reserved_bytes.value, 61'111'009'280);
  EXPECT_EQ(replay->stats.reserved_bytes.value, 61'025'026'048);
  // Reserved bytes after every action, added up from the rows alone.
  std::int64_t reserved = replay->initial_reserved_bytes.value;
  ASSERT_EQ(replay->reserved_bytes.size(), log.actions.size());
  for (std::size_t i = 0; i < log.actions.size(); ++i) {
    if (log.actions[i].kind == LogActionKind::kSegmentAlloc) reserved += log.actions[i].size_bytes.value;
    if (log.actions[i].kind == LogActionKind::kSegmentFree) reserved -= log.actions[i].size_bytes.value;
    ASSERT_EQ(replay->reserved_bytes[i].value, reserved) << i;
  }
}

TEST(Replay, LibTorchUnderEverySetting) {
  const std::vector<std::string> names = LibTorchLogs();
  ASSERT_GE(names.size(), 8U);
  for (const std::string& name : names) {
    const AllocatorLog log = Read(name);
    const Result<AllocatorReplay> replay = ReplayAllocatorLog(log);
    ASSERT_TRUE(replay) << name << ToString(replay.error());
    EXPECT_EQ(replay->reproduced, static_cast<std::int64_t>(log.actions.size()))
        << name << " " << Where(*replay);
    EXPECT_FALSE(replay->departure) << name << " " << Where(*replay);
  }
}

// Without a column for them, streams of new segments follow from the blocks that requests get later.
TEST(Replay, StreamsThatALogDoesNotSayAreFound) {
  AllocatorLog log = Read("libtorch_expandable_max_split.json");
  ASSERT_EQ(log.streams.size(), 2U);
  log.streams_told = false;
  log.streams = {0};
  for (LogAction& action : log.actions) action.stream = -1;
  const AllocatorReplay replay = *ReplayAllocatorLog(log);
  EXPECT_FALSE(replay.departure) << Where(replay);
  EXPECT_TRUE(replay.streams_searched);
  EXPECT_NE(ReplayText(log, replay).find("streams: the log does not say them"), std::string::npos);
  EXPECT_FALSE(ReplayAllocatorLog(Read("h100_training_step.json"))->streams_searched);
}

// The end of an address space shows how large the device is.
TEST(Replay, TheSizeOfTheDeviceIsInferredWhereItMatters) {
  const AllocatorLog log = Read("libtorch_unknown_device.json");
  ASSERT_FALSE(log.device_bytes);
  const AllocatorReplay replay = *ReplayAllocatorLog(log);
  EXPECT_FALSE(replay.departure) << Where(replay);
  ASSERT_TRUE(replay.inferred_device_bytes);
  EXPECT_NEAR(static_cast<double>(replay.inferred_device_bytes->value), 600.0 * kMiB, 60.0 * kMiB);
}

TEST(Replay, IsDeterministic) {
  const AllocatorLog log = Read("h100_training_step.json");
  EXPECT_EQ(ReplayJson(log, *ReplayAllocatorLog(log)), ReplayJson(log, *ReplayAllocatorLog(log)));
}

// Each way to change a row of the log, at random places: the model departs, and at the changed row or, where
// a row can only be found wrong later, not before it.
TEST(Replay, AChangedRowIsFound) {
  const AllocatorLog log = Read("h100_training_step.json");
  for (std::uint32_t seed = 1; seed <= 24; ++seed) {
    std::mt19937 random(seed);
    AllocatorLog changed = log;
    std::size_t row = 800 + random() % (log.actions.size() - 900);
    if (seed % 4 == 1) {
      while (changed.actions[row].kind != LogActionKind::kSegmentAlloc) ++row;
    } else if (seed % 4 == 2) {
      while (changed.actions[row].kind != LogActionKind::kAlloc) ++row;
    }
    SCOPED_TRACE("seed " + std::to_string(seed) + " row " + std::to_string(row));
    LogAction& action = changed.actions[row];
    const bool changes_size = seed % 8 < 4;
    if (changes_size) {
      action.size_bytes.value += 2 * kMiB;
    } else {
      action.address += 512;
    }
    const Result<AllocatorReplay> replay = ReplayAllocatorLog(changed);
    ASSERT_TRUE(replay);
    ASSERT_TRUE(replay->departure);
    EXPECT_GE(replay->departure->action, static_cast<std::int64_t>(row) - 1);
    EXPECT_EQ(replay->reproduced, replay->departure->action);
    // A free or a segment of another size shows at once, as does an allocation at another address.
    const bool at_once = action.kind == LogActionKind::kFree ||
                         (action.kind == LogActionKind::kSegmentAlloc && changes_size) ||
                         (action.kind == LogActionKind::kAlloc && !changes_size);
    if (at_once) {
      EXPECT_EQ(replay->departure->action, static_cast<std::int64_t>(row)) << Where(*replay);
    }
  }
}

TEST(Replay, AMissingOrAddedRowIsFound) {
  const AllocatorLog log = Read("h100_training_step.json");
  const std::size_t segment = 825;  // segment_alloc
  ASSERT_EQ(log.actions[segment].kind, LogActionKind::kSegmentAlloc);
  AllocatorLog missing = log;
  missing.actions.erase(missing.actions.begin() + segment);
  EXPECT_EQ(ReplayAllocatorLog(missing)->departure->action, 825);
  EXPECT_EQ(ReplayAllocatorLog(missing)->departure->model, "a new segment of 2097152 B");
  AllocatorLog added = log;
  added.actions.insert(added.actions.begin() + 800,
                       {LogActionKind::kSegmentFree, log.actions[segment].address, {2 * kMiB}, 0});
  EXPECT_EQ(ReplayAllocatorLog(added)->departure->action, 800);
  AllocatorLog twice = log;
  std::size_t free = 1000;
  while (log.actions[free].kind != LogActionKind::kFree) ++free;
  twice.actions.insert(twice.actions.begin() + static_cast<std::ptrdiff_t>(free), log.actions[free]);
  EXPECT_EQ(ReplayAllocatorLog(twice)->departure->action, static_cast<std::int64_t>(free) + 1);
  EXPECT_EQ(ReplayAllocatorLog(twice)->departure->model, "no allocated block there");
}

TEST(Replay, AnotherSettingDeparts) {
  AllocatorLog log = Read("h100_training_step.json");
  log.settings.max_split_size_bytes = Bytes{64 * kMiB};
  EXPECT_EQ(ReplayAllocatorLog(log)->departure->action, 790);
  log = Read("h100_training_step.json");
  log.settings.roundup_power2_divisions.fill(2);
  EXPECT_TRUE(ReplayAllocatorLog(log)->departure);
  log = Read("h100_training_step.json");
  log.settings.expandable_segments = true;
  EXPECT_TRUE(ReplayAllocatorLog(log)->departure);
}

TEST(Replay, TheLastReservedBytesMustAgree) {
  AllocatorLog log = Read("h100_training_step.json");
  log.final_reserved_bytes->value += 512;
  const Result<AllocatorReplay> replay = ReplayAllocatorLog(log);
  EXPECT_EQ(replay->reproduced, 14234);
  ASSERT_TRUE(replay->departure);
  EXPECT_EQ(replay->departure->action, 14234);
  EXPECT_EQ(replay->departure->log, "61025026560 B as final_reserved_bytes");
}

TEST(Replay, TextShowsTheRowsAroundADeparture) {
  AllocatorLog log = Read("h100_training_step.json");
  log.actions[790].address += 512;
  const AllocatorReplay replay = *ReplayAllocatorLog(log);
  const std::string text = ReplayText(log, replay);
  EXPECT_NE(text.find("reproduced: 790 of 14,234 actions"), std::string::npos) << text;
  EXPECT_NE(text.find("  model: alloc of 10485760 B at 49786945536\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  log:   alloc of 10485760 B at 49786946048\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  > 790  alloc"), std::string::npos) << text;
  EXPECT_NE(text.find("large 65011712 of 165675008 B |"), std::string::npos) << text;
}

}  // namespace
}  // namespace shardplan
