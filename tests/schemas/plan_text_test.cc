// SPDX-License-Identifier: Apache-2.0
// The text form of a plan: exact round trip, and errors that name the line.
#include "shardplan/schemas/plan_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PlanText, RandomPlansParseBackEqual) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Plan plan = test::RandomPlan(seed);
    const std::string text = PlanText(plan);
    const Result<Plan> read = ParsePlanText(text);
    ASSERT_TRUE(read.has_value()) << "seed " << seed << ": " << ToString(read.error()) << "\n" << text;
    ASSERT_TRUE(*read == plan) << "seed " << seed << "\n" << text;
    ASSERT_EQ(PlanText(*read), text) << "seed " << seed;
  }
}

TEST(PlanText, HandBuiltPlansParseBackEqual) {
  for (const bool reshard : {true, false}) {
    for (const int replicas : {1, 2}) {
      const Plan plan =
          test::Fsdp2LikePlan({.units = 3, .replicas = replicas, .reshard_after_forward = reshard});
      const Result<Plan> read = ParsePlanText(PlanText(plan));
      ASSERT_TRUE(read.has_value()) << ToString(read.error());
      EXPECT_TRUE(*read == plan);
    }
  }
}

TEST(PlanText, ReadsAsTheHostActs) {
  const std::string text = PlanText(test::Fsdp2LikePlan({.units = 2}));
  EXPECT_THAT(text, HasSubstr("\nstep steady\n  step_begin\n"));
  EXPECT_THAT(
      text,
      HasSubstr("\n  pre_forward layers.0\n    allocate layers.0.all_gather_output on all_gather_copy_in"));
  EXPECT_THAT(
      text,
      HasSubstr("    all_gather layers.0.all_gather_output -> layers.0.all_gather_output on all_gather via "
                "shard for layers.0\n"));
  EXPECT_THAT(text, HasSubstr("    compute \"forward layers.0\" on compute\n"));
}

TEST(PlanText, AnEditedLineChangesThePlan) {
  const Plan plan = test::Fsdp2LikePlan({.units = 2});
  std::string text = PlanText(plan);
  const std::string line = "    free layers.0.param_unsharded\n";
  text.erase(text.find(line), line.size());
  const Result<Plan> read = ParsePlanText(text);
  ASSERT_TRUE(read.has_value()) << ToString(read.error());
  EXPECT_THAT(DescribeDifferences(plan, *read),
              ElementsAre("step first: in post_forward layers.0, A reshards layers.0 (free); B does not"));
}

struct BadText {
  const char* find;
  const char* replace;
  const char* message;
};

class PlanTextErrors : public ::testing::TestWithParam<BadText> {};

TEST_P(PlanTextErrors, NameTheLine) {
  std::string text = PlanText(test::Fsdp2LikePlan({.units = 2}));
  const std::size_t at = text.find(GetParam().find);
  ASSERT_NE(at, std::string::npos);
  const auto line = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n') + 1;
  text.replace(at, std::string(GetParam().find).size(), GetParam().replace);
  const Result<Plan> read = ParsePlanText(text);
  ASSERT_FALSE(read.has_value());
  EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(read.error().pointer, "line " + std::to_string(line)) << ToString(read.error());
  EXPECT_THAT(ToString(read.error()), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    , PlanTextErrors,
    ::testing::Values(
        BadText{"shardplan plan", "shardplan trace", "not the text form of a plan"},
        BadText{"step_begin", "step_start", "unknown trigger"},
        BadText{"copy_in layers.0", "copyin layers.0", "unknown instruction"},
        BadText{"on all_gather via", "on nowhere via", "there is no stream of that name"},
        BadText{"via shard for", "via shard via shard for", "given twice"},
        BadText{"layers.0.gathered on", "layers.0.gathered onto", "does not parse"},
        BadText{"copy_in layers.0.param_sharded", "copy_in layers.9.param_sharded", "there is no buffer"},
        BadText{"copy_in layers.0.param_sharded", "copy_in #99", "not a buffer of this document"},
        BadText{"bind_sharded layers.0", "bind_sharded \"layers.0", "this is no word"},
        BadText{"    bind_sharded", "     bind_sharded", "indentation"},
        BadText{"\"param_sharded\"", "\"param_shorded\"", "unknown value"},
        BadText{"stream {", "strewm {", "unknown keyword"},
        BadText{"buffer {", "buffer {{", "not valid JSON"}));

// Found by fuzzing: the bytes reached the JSON reader, whose position had no line of the text.
TEST(PlanText, BytesThatAreNoTextNameTheLine) {
  std::string text = PlanText(test::Fsdp2LikePlan({.units = 1}));
  text.replace(text.find("op=average"), 10, "op=ave\xffge");
  const Result<Plan> read = ParsePlanText(text);
  ASSERT_FALSE(read.has_value());
  EXPECT_THAT(read.error().pointer, HasSubstr("line "));
  EXPECT_THAT(read.error().message, HasSubstr("does not parse"));
}

TEST(PlanText, TruncatedTextIsAnErrorOrAnotherPlanButNeverACrash) {
  const Plan plan = test::Fsdp2LikePlan({.units = 1});
  const std::string text = PlanText(plan);
  for (std::size_t bytes = 0; bytes + 1 < text.size(); ++bytes) {
    const Result<Plan> read = ParsePlanText(std::string_view(text).substr(0, bytes));
    EXPECT_FALSE(read.has_value() && *read == plan) << bytes;
  }
}

}  // namespace
}  // namespace shardplan
