// SPDX-License-Identifier: Apache-2.0
// Pools of the virtual machine: what is handed out, and who poisons it.
#include "executor/src/virtual/memory.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace shardplan::executor {
namespace {

// Two buffers, of 8 and of 64 bytes.
Plan SmallAndLarge() {
  Plan plan;
  plan.streams.resize(2);
  for (const std::int64_t bytes : {8, 64}) plan.buffers.push_back({.parts_bytes = {Bytes{bytes}}});
  return plan;
}

std::uint64_t First(std::uint64_t) { return 0; }

bool Owes(const Instance& instance, const Block* block) {
  return std::ranges::any_of(instance.debts,
                             [&](const Debt& debt) { return debt.block == block && debt.freed; });
}

class Pools : public ::testing::TestWithParam<HandOut> {
 protected:
  bool must_fit() const {
    return GetParam() == HandOut::kLastThatFits || GetParam() == HandOut::kAnyThatFits;
  }
  VirtualMemory memory_{SmallAndLarge(), GetParam(), First};
};

TEST_P(Pools, ABlockMayBecomePartOfALargerBuffer) {
  const auto small = memory_.Allocate({Bytes{8}}, 0);
  memory_.Release(*small);
  const auto large = memory_.Allocate({Bytes{64}}, 0);
  EXPECT_EQ(large->blocks[0] == small->blocks[0], !must_fit());
  EXPECT_EQ(Owes(*large, small->blocks[0]), must_fit());
}

TEST_P(Pools, ABlockStaysOnItsStream) {
  const auto block = memory_.Allocate({Bytes{8}}, 0);
  memory_.Release(*block);
  const auto other = memory_.Allocate({Bytes{8}}, 1);
  EXPECT_NE(other->blocks[0], block->blocks[0]);
  EXPECT_FALSE(Owes(*other, block->blocks[0]));
}

// Whoever is allocated next may be given a freed block: also the second, if the first did not use it.
TEST_P(Pools, AFreedBlockIsOwedUntilItIsPoisoned) {
  const auto one = memory_.Allocate({Bytes{8}}, 0);
  const auto two = memory_.Allocate({Bytes{8}}, 0);
  memory_.Release(*one);
  memory_.Release(*two);
  const Block* freed =
      memory_.Allocate({Bytes{8}}, 0)->blocks[0] == one->blocks[0] ? two->blocks[0] : one->blocks[0];
  Debts of_the_model;
  memory_.AddDebts(0, of_the_model);
  Debts again;
  memory_.AddDebts(0, again);
  ASSERT_EQ(of_the_model.size(), 1U);
  EXPECT_EQ(of_the_model[0].block, freed);
  EXPECT_EQ(again.size(), 1U);
  Poison(of_the_model);
  again.clear();
  memory_.AddDebts(0, again);
  EXPECT_TRUE(again.empty());
}

INSTANTIATE_TEST_SUITE_P(Virtual, Pools,
                         ::testing::Values(HandOut::kLastThatFits, HandOut::kAnyThatFits, HandOut::kLast,
                                           HandOut::kAny),
                         [](const auto& info) { return std::to_string(static_cast<int>(info.param)); });

}  // namespace
}  // namespace shardplan::executor
