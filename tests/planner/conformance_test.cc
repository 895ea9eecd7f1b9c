// SPDX-License-Identifier: Apache-2.0
// Every recording of real PyTorch, planned and compared event for event.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "events.h"
#include "not_planned.h"
#include "recording.h"

namespace shardplan::conformance {
namespace {

std::vector<std::string> Cases() {
  std::vector<std::string> cases;
  for (const char* folder : {"fsdp1", "fsdp2", "fsdp2_215", "live", "own"}) {
    const std::string path = std::string(SHARDPLAN_SOURCE_DIR "/tests/conformance/") + folder;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".log") {
        cases.push_back(std::string(folder) + "/" + entry.path().stem().string());
      }
    }
  }
  std::sort(cases.begin(), cases.end());
  return cases;
}

class ConformanceTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ConformanceTest, IssuesWhatPyTorchIssued) {
  const Result<Recording> recording = ReadRecording(SHARDPLAN_SOURCE_DIR "/tests/conformance/" + GetParam());
  if (NotPlanned().contains(GetParam())) {
    EXPECT_FALSE(recording && Compare(*recording).matches) << "it is planned now";
    return;
  }
  ASSERT_TRUE(recording) << ToString(recording.error());
  ASSERT_GT(recording->events.size(), 50u);
  const Comparison comparison = Compare(*recording);
  EXPECT_TRUE(comparison.matches) << comparison.difference;
  // Random cases (live) do what PyTorch does wrong, too.
  if (!GetParam().starts_with("live")) {
    EXPECT_EQ(comparison.objection, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Recordings, ConformanceTest, ::testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
});

// PyTorch 2.15 logs what 2.11 does.
TEST(ConformanceOfReleases, Fsdp1IsTheSameInAll) {
  for (const std::string& name : Cases()) {
    if (!name.starts_with("fsdp1/")) continue;
    Result<Recording> recording = ReadRecording(SHARDPLAN_SOURCE_DIR "/tests/conformance/" + name);
    ASSERT_TRUE(recording) << ToString(recording.error());
    recording->strategy.pytorch = PyTorchVersion::k2_15;
    const Comparison comparison = Compare(*recording);
    EXPECT_TRUE(comparison.matches) << name << ": " << comparison.difference;
  }
}

TEST(ConformanceOfReleases, AllRecordingsAreThere) { EXPECT_EQ(Cases().size(), 212u); }

}  // namespace
}  // namespace shardplan::conformance
