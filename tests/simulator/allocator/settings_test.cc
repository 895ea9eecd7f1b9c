// SPDX-License-Identifier: Apache-2.0
// PYTORCH_ALLOC_CONF as text. The tables and limits here are what libc10 of torch 2.11 answers.
#include "allocator_fixture.h"

namespace shardplan {
namespace {

AllocatorSettings Parsed(std::string_view text) {
  AllocatorSettings settings;
  const Status status = ParseAllocatorSettings(text, Bytes{100 * kGiB}, settings);
  EXPECT_TRUE(status) << text << ": " << (status ? "" : ToString(status.error()));
  return settings;
}

using Table = std::array<std::int64_t, 16>;

TEST(Settings, RoundupDivisions) {
  EXPECT_EQ(Parsed("roundup_power2_divisions:4").roundup_power2_divisions,
            (Table{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}));
  EXPECT_EQ(Parsed("roundup_power2_divisions:[1:2,4:8,16:4,>:1]").roundup_power2_divisions,
            (Table{2, 0, 8, 0, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(Parsed("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions,
            (Table{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8}));
  EXPECT_EQ(Parsed("roundup_power2_divisions:[>:8]").roundup_power2_divisions,
            (Table{0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}));
  EXPECT_EQ(Parsed("roundup_power2_divisions:[64:8,2:4]").roundup_power2_divisions,
            (Table{8, 4, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(Parsed("roundup_power2_divisions:[131072:8]").roundup_power2_divisions,
            (Table{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8}));
}

TEST(Settings, TheLargeSegmentComesFirstWhereverItStands) {
  const AllocatorSettings settings = Parsed("max_non_split_rounding_mb:64,large_segment_size_mb:40");
  EXPECT_EQ(settings.large_segment_bytes.value, 40 * kMiB);
  EXPECT_EQ(settings.max_non_split_rounding_bytes.value, 64 * kMiB);
  EXPECT_EQ(Parsed("large_segment_size_mb:40").max_non_split_rounding_bytes.value, 40 * kMiB);
  EXPECT_EQ(Parsed("max_split_size_mb:12,large_segment_size_mb:11").max_split_size_bytes->value, 12 * kMiB);
}

TEST(Settings, SeveralWithSpaces) {
  const AllocatorSettings settings = Parsed(
      " expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.75,"
      "pinned_use_background_threads:True,backend:native,per_process_memory_fraction:0.5");
  EXPECT_TRUE(settings.expandable_segments);
  EXPECT_EQ(settings.max_split_size_bytes->value, 128 * kMiB);
  EXPECT_EQ(settings.garbage_collection_threshold, 0.75);
  EXPECT_EQ(settings.allowed_bytes->value, 50 * kGiB);
  EXPECT_FALSE(Parsed("per_process_memory_fraction:1.0").allowed_bytes);
}

TEST(Settings, PrintAndParse) {
  for (const char* text :
       {"", "expandable_segments:True", "large_segment_size_mb:40",
        "max_split_size_mb:128,max_non_split_rounding_mb:64", "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "large_segment_size_mb:40,max_non_split_rounding_mb:50"}) {
    const AllocatorSettings settings = Parsed(text);
    EXPECT_EQ(Parsed(ToString(settings)), settings) << text << " -> " << ToString(settings);
  }
  EXPECT_EQ(ToString(AllocatorSettings{}), "");
}

TEST(Settings, WhatLibTorchRefuses) {
  const std::pair<const char*, const char*> cases[] = {
      {"max_split_size_mb:10", "10"},
      {"large_segment_size_mb:10", "10"},
      {"max_split_size_mb:30,large_segment_size_mb:40", "30"},
      {"max_non_split_rounding_mb:19", "19"},
      {"max_split_size_mb:", ""},
      {"max_split_size_mb:1e3", "1e3"},
      {"garbage_collection_threshold:0", "0"},
      {"garbage_collection_threshold:1", "1"},
      {"garbage_collection_threshold:nan", "nan"},
      {"expandable_segments:true", "true"},
      {"roundup_power2_divisions:0", "0"},
      {"roundup_power2_divisions:3", "3"},
      {"roundup_power2_divisions:[3:4]", "3:4"},
      {"roundup_power2_divisions:[4:3]", "4:3"},
      {"roundup_power2_divisions:[4:4", "[4:4"},
      {"backend:cudaMallocAsync", "cudaMallocAsync"},
      {"expandable_segment:True", "expandable_segment"},
      {"expandable_segments", "expandable_segments"}};
  for (const auto& [text, found] : cases) {
    AllocatorSettings settings;
    const Status status = ParseAllocatorSettings(text, Bytes{kGiB}, settings);
    ASSERT_FALSE(status) << text;
    EXPECT_EQ(status.error().code, ErrorCode::kUsage) << text;
    EXPECT_EQ(status.error().found, "\"" + std::string(found) + "\"") << text;
    EXPECT_FALSE(status.error().expected.empty()) << text;
  }
}

TEST(Settings, AFractionNeedsTheSizeOfTheDevice) {
  AllocatorSettings settings;
  EXPECT_FALSE(ParseAllocatorSettings("per_process_memory_fraction:0.5", std::nullopt, settings));
}

}  // namespace
}  // namespace shardplan
