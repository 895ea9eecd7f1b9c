// SPDX-License-Identifier: Apache-2.0
// The words for the difference of two plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "schemas/src/text/sentence_groups.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/support/random_documents.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

TEST(PlanDiff, EqualPlansHaveNone) {
  const Plan plan = test::Fsdp2LikePlan({.units = 3});
  EXPECT_THAT(DescribeDifferences(plan, plan), IsEmpty());
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Plan random = test::RandomPlan(seed);
    EXPECT_THAT(DescribeDifferences(random, random), IsEmpty()) << "seed " << seed;
  }
}

TEST(PlanDiff, DifferentPlansHaveSome) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Plan a = test::RandomPlan(seed);
    const Plan b = test::RandomPlan(seed + 1000);
    EXPECT_THAT(DescribeDifferences(a, b), Not(IsEmpty())) << "seed " << seed;
  }
}

TEST(PlanDiff, ReshardAfterForwardInOneSentencePerDecision) {
  const Plan a = test::Fsdp2LikePlan({.units = 32});
  const Plan b = test::Fsdp2LikePlan({.units = 32, .reshard_after_forward = false});
  EXPECT_THAT(DescribeDifferences(a, b), ElementsAre("in post_forward layers.{n}, A reshards layers.{n} "
                                                     "(bind_sharded, free); B does not (n = 0..30: 31 times)",
                                                     "in pre_backward layers.{n}, A unshards layers.{n-1} "
                                                     "(allocate, copy_in, record, wait, all_gather); B does "
                                                     "not (n = 1..31: 31 times)",
                                                     "in pre_backward layers.{n}, A finishes unsharding "
                                                     "layers.{n} (wait, allocate, copy_out, bind_unsharded, "
                                                     "record, free); B does not (n = 0..30: 31 times)"));
}

TEST(PlanDiff, APrefetchIsEarlier) {
  const Plan a = test::Fsdp2LikePlan({.units = 32, .prefetch = false});
  const Plan b = test::Fsdp2LikePlan({.units = 32});
  EXPECT_THAT(
      DescribeDifferences(a, b),
      Contains("B issues allocate, copy_in, record, wait, all_gather of layers.{n} earlier: in pre_backward "
               "layers.{n+1} instead of pre_backward layers.{n} (n = 0..30: 31 times)"));
}

TEST(PlanDiff, SizesAndDtypes) {
  const Plan a = test::Fsdp2LikePlan({.units = 4});
  const Plan b = test::Fsdp2LikePlan({.units = 4, .mixed_precision = true});
  EXPECT_THAT(
      DescribeDifferences(a, b),
      Contains("buffer layers.{n}.param_unsharded parts_bytes: [32] in A, [16] in B (n = 0..3: 4 times)"));
}

TEST(PlanDiff, StrategyAndClusterFieldByField) {
  const Plan a = test::Fsdp2LikePlan({.units = 1});
  Plan b = a;
  b.strategy.fsdp2.backward_prefetch = 2;
  b.strategy.reshard_after_forward = ReshardAfterForward(std::int64_t{4});
  b.cluster.device.memory_bytes = Bytes{7};
  EXPECT_THAT(DescribeDifferences(a, b), ElementsAre("strategy reshard_after_forward: not given in A, 4 in B",
                                                     "strategy fsdp2 backward_prefetch: -1 in A, 2 in B",
                                                     "cluster device memory_bytes: 0 in A, 7 in B"));
}

TEST(PlanDiff, NamesOfEventsSayNothing) {
  const Plan a = test::Fsdp2LikePlan({.units = 3});
  Plan b = a;
  for (std::string& event : b.events) event += " renamed";
  EXPECT_THAT(DescribeDifferences(a, b), ElementsAre(HasSubstr("numbering")));
}

TEST(PlanDiff, ReasonsAlone) {
  const Plan a = test::Fsdp2LikePlan({.units = 1});
  Plan b = a;
  b.steps[0].triggers[1].instructions.Edit()[0].reason = "another";
  EXPECT_THAT(DescribeDifferences(a, b), ElementsAre("only the reasons given for instructions differ"));
}

TEST(PlanDiff, AMissingWaitIsToldByWhatItWaitedFor) {
  const Plan a = test::Fsdp2LikePlan({.units = 2});
  Plan b = a;
  for (Trigger& trigger : b.steps[1].triggers) {
    if (Describe(b, trigger) != "pre_forward layers.1") continue;
    std::erase_if(trigger.instructions.Edit(), [&](const Instruction& instruction) {
      return Describe(b, instruction).ends_with("layers.1.gathered on compute") &&
             instruction.kind == InstructionKind::kWait;
    });
  }
  EXPECT_THAT(DescribeDifferences(a, b),
              ElementsAre("step steady: in pre_forward layers.1, A issues \"compute waits for all_gather "
                          "layers.1.all_gather_output\"; B does not"));
}

TEST(SentenceGroups, KeepDistances) {
  EXPECT_THAT(
      GroupSentences({"a layers.3 b layers.2", "x", "a layers.4 b layers.3", "a layers.9 b layers.7"}),
      ElementsAre("a layers.{n} b layers.{n-1} (n = 3..4: 2 times)", "x", "a layers.9 b layers.7"));
}

TEST(SentenceGroups, DoNotTouchOtherNumbers) {
  EXPECT_THAT(GroupSentences({"0.5 of 12.7 v1.2", "0.6 of 12.7 v1.2"}), SizeIs(2));
  EXPECT_THAT(GroupSentences({"same", "same", "same"}), ElementsAre("same (3 times)"));
  EXPECT_EQ(NumberRanges({0, 1, 2, 5, 7, 8}), "0..2, 5, 7..8");
}

}  // namespace
}  // namespace shardplan
