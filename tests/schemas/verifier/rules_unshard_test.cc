// SPDX-License-Identifier: Apache-2.0
// Rules on ids and on parameters: reference, use_before_unshard, read_before_write. Each: a good plan with
// one mistake, and what is reported. Consequences of a mistake are listed, too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/schemas/verifier/rules.h"

namespace shardplan::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;

TEST_F(Rules, GoodPlansHaveNoViolation) {
  EXPECT_THAT(Verify(good_), IsEmpty());
  EXPECT_THAT(Verify(hsdp_), IsEmpty());
}

// ---- reference ----

TEST_F(Rules, ReferenceIdOutOfRange) {
  for (const int which : {0, 1, 2, 3, 4, 5}) {
    Plan plan = good_;
    Instruction& i = test::InstructionAt(plan, Steady(plan, kAllGather)[0]);
    (which == 0   ? i.src
     : which == 1 ? i.dst
     : which == 2 ? i.stream
     : which == 3 ? i.communicator
     : which == 4 ? i.unit
                  : i.event) = 1000;
    EXPECT_THAT(RulesOf(plan), Contains("reference")) << which;
  }
}

TEST_F(Rules, ReferenceRoleThatMakesNoSense) {
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kReduceScatter)[0]).src =
      BufferNamed(plan, "layers.0.param_sharded");
  EXPECT_THAT(RulesOf(plan), Contains("reference"));
}

TEST_F(Rules, ReferenceBuffersOfDifferentUnits) {
  Plan plan = good_;
  test::InstructionAt(plan, Steady(plan, kCopyOut, "layers.0.param_unsharded")[0]).dst =
      BufferNamed(plan, "layers.1.param_unsharded");
  EXPECT_THAT(RulesOf(plan), Contains("reference"));
}

TEST_F(Rules, ReferenceInTheTables) {
  const auto rules_after = [&](auto&& change) {
    Plan plan = good_;
    change(plan);
    return RulesOf(plan);
  };
  using Only = std::set<std::string>;
  const Only reference = {"reference"};
  EXPECT_EQ(rules_after([](Plan& p) { p.units[0].shard_communicator = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.buffers[0].unit = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.buffers[0].parameters = {7}; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.segments[0].reads = {-1}; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.segments[1].grads[0].parameter = 9; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.steady_step = 2; }), reference);
  EXPECT_EQ(rules_after([](Plan& p) { p.communicators[0].size = 0; }), reference);
}

// ---- use_before_unshard ----

TEST_F(Rules, UseBeforeUnshardWhenNotBound) {
  const Plan plan = test::Without(good_, Steady(good_, kBindUnsharded, "layers.0.param_unsharded")[0]);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"use_before_unshard"}));
}

// Binding makes views. The reader has to find the content in the memory.
TEST_F(Rules, UseBeforeUnshardWhenReadBeforeTheCopyOut) {
  test::Spot copy_out = Steady(good_, kCopyOut, "layers.0.param_unsharded")[0];
  Plan plan = test::Swapped(good_, copy_out);
  EXPECT_THAT(Verify(plan), IsEmpty());
  do {
    plan = test::Swapped(plan, {copy_out.step, copy_out.trigger, ++copy_out.instruction});
  } while (test::InstructionAt(plan, copy_out).kind != kCompute);
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"use_before_unshard"}));
}

TEST_F(Rules, UseBeforeUnshardWhenTheComputeStreamHasNotWaited) {
  // The copy-out on another stream, which waits for all it needs; nobody waits for it.
  Plan plan = good_;
  const StreamId gather = StreamNamed(plan, "all_gather");
  const test::Spot spot = Steady(plan, kCopyOut, "layers.0.param_unsharded")[0];
  test::InstructionAt(plan, spot).stream = gather;
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_THAT(RulesOf(violations), Contains("use_before_unshard"));
  EXPECT_THAT(Explain(plan, violations[0]), HasSubstr("stream all_gather"));
}

// ---- read_before_write ----

TEST_F(Rules, ReadBeforeWriteWithoutTheWaitForTheAllGather) {
  const test::Spot copy_out = Steady(good_, kCopyOut, "layers.0.all_gather_output")[0];
  const Plan plan = test::Without(good_, WaitBefore(good_, copy_out, 0));
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"read_before_write"}));
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].step, 1);
  EXPECT_EQ(violations[0].trigger, static_cast<std::int32_t>(copy_out.trigger));
  // Removing the wait moved it one up.
  EXPECT_EQ(violations[0].instruction, static_cast<std::int32_t>(copy_out.instruction) - 1);
}

TEST_F(Rules, ReadBeforeWriteWithoutTheAllGather) {
  const Plan plan = test::Without(good_, Steady(good_, kAllGather, "layers.0.all_gather_output")[0]);
  const std::vector<Violation> violations = Verify(plan);
  EXPECT_EQ(RulesOf(violations), (std::set<std::string>{"read_before_write"}));
  EXPECT_THAT(violations[0].message, HasSubstr("holds only this rank's part"));
}

TEST_F(Rules, ReadBeforeWriteWhenTheNextStepDoesNotWaitForTheOptimizer) {
  // The first trigger of the forward makes the gathering streams wait for compute, hence for the optimizer.
  const test::Spot copy_in = Steady(good_, kCopyIn, "layers.0.param_sharded")[0];
  const Plan plan =
      test::Without(good_, WaitBefore(good_, copy_in, StreamNamed(good_, "all_gather_copy_in")));
  EXPECT_EQ(RulesOf(plan), (std::set<std::string>{"read_before_write"}));
}

}  // namespace
}  // namespace shardplan::test
