// SPDX-License-Identifier: Apache-2.0
// A plan that is read part by part is the plan that is read as a whole; where the text is wrong, both say so
// alike.
#include "documents/plan_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <string>

#include "files/available_memory.h"
#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

// One more space in the second line, and the reader of parts does not know the text.
std::string ForTheOtherReader(std::string text) {
  const std::string_view begin = "{\n  \"schema\": ";
  if (text.starts_with(begin)) text.insert(begin.size(), " ");
  return text;
}

void ExpectAlike(const std::string& text, const std::string& what) {
  const Result<Plan> by_parts = ParsePlan(text);
  const std::string other = ForTheOtherReader(text);
  ASSERT_FALSE(ReadPlanByParts(other).has_value()) << what;
  const Result<Plan> whole = ParsePlan(other);
  ASSERT_EQ(by_parts.has_value(), whole.has_value()) << what << "\n" << text;
  if (by_parts.has_value()) {
    EXPECT_EQ(*by_parts, *whole) << what;
  } else if (!by_parts.error().pointer.starts_with("line 2,")) {
    EXPECT_EQ(ToString(by_parts.error()), ToString(whole.error())) << what;
  }
}

TEST(PlanParts, RandomPlans) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const Plan plan = test::RandomPlan(seed);
    const std::string text = ToJson(plan);
    const std::optional<Plan> read = ReadPlanByParts(text);
    ASSERT_TRUE(read.has_value()) << "seed " << seed;
    EXPECT_EQ(*read, plan) << "seed " << seed;
    ExpectAlike(text, "seed " + std::to_string(seed));
  }
}

// Bytes changed, left out, doubled, moved.
TEST(PlanParts, DamagedPlans) {
  const std::string small = ToJson(test::Fsdp2LikePlan({.units = 1}));
  int good = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    std::mt19937_64 random(seed);
    std::string text = seed % 4 == 0 ? ToJson(test::RandomPlan(seed)) : small;
    const std::string_view bytes = "{}[],:\"\\ \n019-.eantl";
    for (std::size_t change = 1 + random() % 2; change > 0; --change) {
      const std::size_t at = random() % text.size();
      const std::size_t length = std::min<std::size_t>(1 + random() % 40, text.size() - at);
      switch (random() % 4) {
        case 0:
          text[at] = bytes[random() % bytes.size()];
          break;
        case 1:
          text.erase(at, random() % 2 == 0 ? 1 : length);
          break;
        case 2:
          text.insert(at, std::string(1, bytes[random() % bytes.size()]));
          break;
        default:
          text.insert(random() % text.size(), text.substr(at, length));
      }
    }
    good += ParsePlan(text).has_value() ? 1 : 0;
    ExpectAlike(text, "seed " + std::to_string(seed));
  }
  EXPECT_GT(good, 50);  // names and numbers that may be others
}

TEST(PlanParts, FieldsInAnotherOrderOrTwice) {
  const std::string text = ToJson(test::Fsdp2LikePlan({.units = 2}));
  const std::size_t steps = text.find(",\n  \"steps\": [");
  const std::size_t buffers = text.find(",\n  \"buffers\": [");
  ASSERT_NE(steps, std::string::npos);
  ASSERT_NE(buffers, std::string::npos);
  std::string moved = text;
  const std::string of_steps = text.substr(steps, text.rfind("\n}") - steps);
  moved.erase(steps, of_steps.size());
  moved.insert(buffers, of_steps);
  EXPECT_TRUE(ReadPlanByParts(moved).has_value());
  ExpectAlike(moved, "steps before buffers");
  std::string twice = text;
  twice.insert(buffers, of_steps);
  ExpectAlike(twice, "steps twice");
  ExpectAlike(text + "x", "more behind it");
  ExpectAlike(text.substr(0, text.size() / 2), "half of it");
  ExpectAlike("", "nothing");
}

TEST(PlanParts, FromAFileOfSeveralWindows) {
  const Plan plan = test::Fsdp2LikePlan({.units = 400});
  const std::string text = ToJson(plan);
  ASSERT_GT(text.size(), std::size_t{1} << 20);
  const std::string path = testing::TempDir() + "parts." + std::to_string(getpid()) + ".json";
  std::ofstream(path) << text;
  const Result<Plan> read = ReadPlan(path);
  const Result<Document> document = ReadDocument(path);
  ASSERT_TRUE(read.has_value()) << ToString(read.error());
  EXPECT_EQ(*read, plan);
  ASSERT_TRUE(document.has_value());
  EXPECT_EQ(std::get<Plan>(*document), plan);
  std::ofstream(path) << text.substr(0, text.size() - 100);
  EXPECT_FALSE(ReadPlan(path).has_value());
  ::unlink(path.c_str());
}

TEST(PlanParts, TextAndDigestComeInPieces) {
  const Plan plan = test::Fsdp2LikePlan({.units = 100});
  std::string joined;
  int pieces = 0;
  WriteJson(plan, [&](std::string_view piece) {
    joined += piece;
    ++pieces;
  });
  EXPECT_GT(pieces, 1);
  EXPECT_EQ(joined, ToJson(plan));
  EXPECT_EQ(DigestOfJson(plan), Digest(ToJson(plan)));
}

TEST(AvailableMemory, IsLookedAtBeforeItIsTaken) {
  EXPECT_GT(AvailableMemoryBytes(), 0);
  EXPECT_TRUE(CheckMemory("reading it", 1).has_value());
  const Status much = CheckMemory("reading it", std::int64_t{1} << 60);
  ASSERT_FALSE(much.has_value());
  EXPECT_EQ(much.error().code, ErrorCode::kEnvironment);
  EXPECT_THAT(much.error().message, testing::HasSubstr("reading it needs about 1099511627776 MiB"));
}

// A file of gigabytes (of no bytes on the disk) is not read.
TEST(AvailableMemory, AFileThatIsTooLarge) {
  const std::string path = testing::TempDir() + "large." + std::to_string(getpid()) + ".json";
  std::ofstream(path) << "{";
  ASSERT_EQ(::truncate(path.c_str(), std::int64_t{1} << 42), 0);
  for (const Error& error : {ReadFile(path).error(), ReadPlan(path).error(), ReadTrace(path).error()}) {
    EXPECT_EQ(error.code, ErrorCode::kEnvironment);
    EXPECT_EQ(error.file, path);
  }
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace shardplan
