// SPDX-License-Identifier: Apache-2.0
// Logs that the reader refuses, and its words.
#include <filesystem>
#include <fstream>

#include "allocator_fixture.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

constexpr char kGood[] = R"({
"about": "small", "allocator_settings": {"expandable_segments": false, "max_split_size": -1},
"columns": {"initial_segments": ["address", "bytes", "stream", "pool", ["blocks: [address, requested_bytes, block_bytes]"]],
            "events": ["action", "address", "bytes"]},
"initial_segments": [[0, 20971520, 0, "large", [[0, 3000000, 3000320]]], [20971520, 2097152, 0, "small", []]],
"events": [["alloc", 3000320, 2000000], ["free", 0, 3000000], ["snapshot", 0, 0],
           ["segment_alloc", 41943040, 31457280], ["alloc", 41943040, 31457280], ["segment_free", 20971520, 2097152]],
"final_reserved_bytes": 52428800})";

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(ReplayInput, TheGoodLog) {
  const Result<AllocatorLog> log = ParseAllocatorLog(kGood);
  ASSERT_TRUE(log) << ToString(log.error());
  const Result<AllocatorReplay> replay = ReplayAllocatorLog(*log);
  ASSERT_TRUE(replay);
  EXPECT_EQ(replay->reproduced, 6) << (replay->departure ? replay->departure->model : "");
  EXPECT_FALSE(replay->departure);
}

struct Case {
  const char* from;
  const char* to;
  const char* pointer;
  const char* found;
};

TEST(ReplayInput, ErrorsNameTheirPlace) {
  const Case cases[] = {
      {"\"alloc\", 3000320", "\"allocate\", 3000320", "/events/0/0", "\"allocate\""},
      {"3000320, 2000000", "\"x\", 2000000", "/events/0/1", "\"x\""},
      {"3000320, 2000000", "3000320, -1", "/events/0/2", "-1"},
      {"3000320, 2000000", "3000320, 1.5", "/events/0/2", "1.5"},
      {"3000320, 2000000", "3000320, 99999999999999999999", "/events/0/2", "1e+20"},
      {"[\"free\", 0, 3000000]", "[\"free\", 0]", "/events/1", "[\"free\",0]"},
      {"[\"free\", 0, 3000000]", "7", "/events/1", "7"},
      {"\"large\"", "\"medium\"", "/initial_segments/0/3", "\"medium\""},
      {"[0, 3000000, 3000320]", "[0, 3000000]", "/initial_segments/0/4/0", "[0,3000000]"},
      {"[0, 3000000, 3000320]", "[0, 3000000, 30003200]", "/initial_segments/0/4/0", "[0,3000000,30003200]"},
      {"[0, 3000000, 3000320]", "[0, 4000000, 3000320]", "/initial_segments/0/4/0", "4000000"},
      {"[20971520, 2097152", "[20971000, 2097152", "/initial_segments", "20971000"},
      {"\"max_split_size\": -1", "\"max_split_size\": 0", "/allocator_settings/max_split_size", "0"},
      {"\"expandable_segments\": false", "\"expandable_segments\": 1",
       "/allocator_settings/expandable_segments", "1"},
      {"\"max_split_size\": -1", "\"garbage_collection_threshold\": 1.5",
       "/allocator_settings/garbage_collection_threshold", "1.5"},
      {"\"max_split_size\": -1", "\"roundup_power2_divisions\": 3",
       "/allocator_settings/roundup_power2_divisions", "3"},
      {"\"max_split_size\": -1", "\"PYTORCH_CUDA_ALLOC_CONF\": \"max_split:3\"",
       "/allocator_settings/PYTORCH_CUDA_ALLOC_CONF", "\"max_split\""},
      {"[\"action\", \"address\", \"bytes\"]", "[\"action\", \"bytes\"]", "/columns/events",
       "[\"action\",\"bytes\"]"},
      {"\"final_reserved_bytes\": 52428800", "\"final_reserved_bytes\": \"x\"", "/final_reserved_bytes",
       "\"x\""}};
  for (const Case& test : cases) {
    const Result<AllocatorLog> log = ParseAllocatorLog(Replaced(kGood, test.from, test.to));
    ASSERT_FALSE(log) << test.to;
    EXPECT_EQ(log.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(log.error().pointer, test.pointer) << ToString(log.error());
    EXPECT_EQ(log.error().found, test.found) << ToString(log.error());
    EXPECT_FALSE(log.error().expected.empty()) << ToString(log.error());
  }
}

TEST(ReplayInput, AMissingFieldIsNamed) {
  const Result<AllocatorLog> log = ParseAllocatorLog(Replaced(kGood, "\"events\": [[", "\"actions\": [["));
  ASSERT_FALSE(log);
  EXPECT_EQ(log.error().expected, "events");
}

// Every prefix is refused without a crash, and says where the file ends.
TEST(ReplayInput, EveryTruncationIsRefused) {
  const std::string text = kGood;
  for (std::size_t length = 0; length < text.size(); ++length) {
    const Result<AllocatorLog> log = ParseAllocatorLog(std::string_view(text).substr(0, length));
    ASSERT_FALSE(log) << length;
    ASSERT_EQ(log.error().pointer, "byte " + std::to_string(length + 1)) << ToString(log.error());
  }
}

// Any single byte replaced: an error or a log that can be replayed, never a crash.
TEST(ReplayInput, EveryGarbledByteIsSurvived) {
  int refused = 0;
  for (std::size_t at = 0; at + 1 < sizeof(kGood); ++at) {
    for (const char garbage : {'9', '-', 'x', ']', '"', '\xff'}) {
      std::string text = kGood;
      text[at] = garbage;
      const Result<AllocatorLog> log = ParseAllocatorLog(text);
      if (log) {
        const Result<AllocatorReplay> replay = ReplayAllocatorLog(*log);
        if (replay) {
          EXPECT_LE(replay->reproduced, replay->actions);
        }
      } else {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(ReplayInput, ColumnsAreFoundByName) {
  std::string text = Replaced(kGood, "[\"action\", \"address\", \"bytes\"]",
                              "[\"bytes\", \"time\", \"action\", \"address\"]");
  text = text.substr(0, text.find("\"events\": [[")) +
         "\"events\": [[2000000, 5, \"alloc\", 3000320]], \"final_reserved_bytes\": 23068672, \"extra\": 1}";
  const Result<AllocatorLog> log = ParseAllocatorLog(text);
  ASSERT_TRUE(log) << ToString(log.error());
  EXPECT_FALSE(ReplayAllocatorLog(*log)->departure);
  ASSERT_EQ(log->notes.size(), 1U);
  EXPECT_EQ(log->notes[0], "field \"extra\" has no effect");
}

TEST(ReplayInput, AFileThatIsNotThere) {
  const Result<AllocatorLog> log = ReadAllocatorLog("/nonexistent/log.json");
  ASSERT_FALSE(log);
  EXPECT_EQ(log.error().code, ErrorCode::kBadInput);
}

}  // namespace
}  // namespace shardplan
