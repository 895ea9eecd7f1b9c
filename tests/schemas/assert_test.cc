// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/assert.h"

#include <gtest/gtest.h>

namespace shardplan {
namespace {

TEST(Assert, PassesWhatHolds) {
  int evaluated = 0;
  SHARDPLAN_ASSERT(++evaluated == 1, "evaluated once");
  EXPECT_EQ(evaluated, 1);
}

TEST(AssertDeathTest, SaysWhereWhatAndWhyInEveryBuild) {
  const int size = 2;
  EXPECT_DEATH(SHARDPLAN_ASSERT(size == 3, "there are three"),
               "a bug of shardplan: .*assert_test.cc:[0-9]+: .*`size == 3` does not hold: there are three");
}

}  // namespace
}  // namespace shardplan
