// The text form of a plan: exact round trip, and errors that name the line.
#include "shardplan/schemas/plan_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "shardplan/schemas/io.h"
#include "tests/support/random_documents.h"

namespace shardplan {
namespace {

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

}  // namespace
}  // namespace shardplan
