// SPDX-License-Identifier: Apache-2.0
// Rules of the collectives that the model issues itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/support/plan_builder.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

OperatorEvent Issue(ModelCollective collective, DType dtype = DType::kFloat32) {
  OperatorEvent op{.name = "c10d.any", .dtype = dtype};
  collective.size_bytes = Bytes{64};
  op.collective = collective;
  return op;
}
ModelCollective Send(std::int32_t peer, std::int32_t work = -1, std::int32_t batch = -1) {
  return {.kind = CollectiveKind::kSend, .communicator = 1, .work = work, .peer = peer, .batch = batch};
}
ModelCollective Receive(std::int32_t peer, std::int32_t work = -1, std::int32_t batch = -1) {
  return {.kind = CollectiveKind::kReceive, .communicator = 1, .work = work, .peer = peer, .batch = batch};
}

// A plan that verifies, whose first forward begins with `entries`. Communicator 1 is of four ranks.
Plan With(const std::vector<SegmentEntry>& entries) {
  Plan plan = test::Fsdp2LikePlan({.units = 2, .shards = 4});
  plan.communicators.insert(plan.communicators.begin() + 1, {"cp", 4, 1});
  for (Unit& unit : plan.units) {
    for (CommunicatorId* id : {&unit.replicate_communicator, &unit.post_forward_communicator}) {
      if (*id >= 1) ++*id;
    }
  }
  std::vector<SegmentEntry>& first = plan.segments.front().entries;
  first.insert(first.begin(), entries.begin(), entries.end());
  return plan;
}

std::set<std::string> RulesIn(const std::vector<Violation>& violations) {
  std::set<std::string> rules;
  for (const Violation& v : violations) rules.emplace(Name(v.rule));
  return rules;
}
std::set<std::string> RulesOf(const std::vector<SegmentEntry>& entries) {
  return RulesIn(Verify(With(entries)));
}

using Rules = std::set<std::string>;

TEST(ModelCollectiveRules, CollectivesOfAllRanksVerify) {
  for (const CollectiveKind kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce,
        CollectiveKind::kAllToAll, CollectiveKind::kBroadcast, CollectiveKind::kGather}) {
    EXPECT_EQ(RulesOf({Issue({.kind = kind, .communicator = 1})}), Rules{}) << Name(kind);
    EXPECT_EQ(RulesOf({Issue({.kind = kind, .communicator = 1, .work = 3}), CollectiveWaitEvent{3}}),
              Rules{});
  }
}

TEST(ModelCollectiveRules, ACommunicatorOrPeerThatIsNoneIsAReference) {
  EXPECT_EQ(RulesOf({Issue({.kind = CollectiveKind::kAllReduce, .communicator = 9})}), Rules{"reference"});
  EXPECT_EQ(RulesOf({Issue(Send(4)), Issue(Receive(4))}), Rules{"reference"});
  EXPECT_EQ(RulesOf({Issue(Send(0)), Issue(Receive(0))}), Rules{"reference"});
  EXPECT_EQ(RulesOf({Issue({.kind = CollectiveKind::kAllReduce, .communicator = 1, .peer = 2})}),
            Rules{"reference"});
}

TEST(ModelCollectiveRules, AWaitForWhatNothingIssued) {
  EXPECT_EQ(RulesOf({CollectiveWaitEvent{7}}), Rules{"wait_before_record"});
}

// Every rank sends one place on, so every rank receives from one place back: three on, among four.
TEST(ModelCollectiveRules, ARingMeetsItself) {
  for (const std::int32_t on : {1, 2, 3}) {
    EXPECT_EQ(RulesOf({Issue(Send(on, -1, 5)), Issue(Receive(4 - on, -1, 5))}), Rules{}) << on;
    EXPECT_EQ(RulesOf({Issue(Receive(4 - on, -1, 5)), Issue(Send(on, -1, 5))}), Rules{}) << on;
    EXPECT_EQ(RulesOf({Issue(Send(on, 0)), Issue(Receive(4 - on, 1)), CollectiveWaitEvent{0},
                       CollectiveWaitEvent{1}}),
              Rules{});
  }
}

TEST(ModelCollectiveRules, ASendThatNobodyReceives) {
  EXPECT_EQ(RulesOf({Issue(Send(1, 0))}), Rules{"collective_order"});
  EXPECT_EQ(RulesOf({Issue(Receive(1, 0))}), Rules{"collective_order"});
  EXPECT_EQ(RulesOf({Issue(Send(1, -1, 5)), Issue(Receive(1, -1, 5))}), Rules{"collective_order"})
      << "sent one place on, received from one place on";
}

TEST(ModelCollectiveRules, MessagesThatDiffer) {
  EXPECT_EQ(RulesOf({Issue(Send(1, -1, 5)), Issue(Receive(3, -1, 5), DType::kBFloat16)}),
            Rules{"collective_order"});
}

TEST(ModelCollectiveRules, WaitingForOneHalfBeforeTheOtherIsIssued) {
  EXPECT_EQ(RulesOf({Issue(Send(1)), Issue(Receive(3))}), Rules{"deadlock"});
  EXPECT_EQ(RulesOf({Issue(Receive(3)), Issue(Send(1))}), Rules{"deadlock"});
  EXPECT_EQ(RulesOf({Issue(Send(1, 0)), CollectiveWaitEvent{0}, Issue(Receive(3))}), Rules{"deadlock"});
  EXPECT_EQ(RulesOf({Issue(Send(1)), OperatorEvent{.name = "aten.mm"}, Issue(Receive(3))}),
            Rules{"deadlock"});
}

TEST(ModelCollectiveRules, RanksThatIssueThemInAnotherOrder) {
  const SegmentEntry reduce = Issue({.kind = CollectiveKind::kAllReduce, .communicator = 1});
  const SegmentEntry exchange = Issue({.kind = CollectiveKind::kAllToAll, .communicator = 1});
  std::vector<Plan> plans(4, With({reduce, exchange}));
  EXPECT_THAT(VerifyRanks(plans), IsEmpty());
  plans[2] = With({exchange, reduce});
  const std::vector<Violation> violations = VerifyRanks(plans);
  EXPECT_THAT(RulesIn(violations), Contains("collective_order"));
  EXPECT_THAT(violations.front().message, HasSubstr("communicator cp"));
}

// FSDP's own communicator: a rank without the model's collective comes to a gather first.
TEST(ModelCollectiveRules, OnASharedCommunicatorFsdpsCountToo) {
  const SegmentEntry reduce = Issue({.kind = CollectiveKind::kAllReduce, .communicator = 0});
  std::vector<Plan> plans(4, With({reduce}));
  plans[1] = With({});
  EXPECT_THAT(RulesIn(VerifyRanks(plans)), Contains("collective_order"));
}

// Two communicators that two ranks come to in another order, each waiting at once.
TEST(ModelCollectiveRules, RanksThatWaitForEachOther) {
  const SegmentEntry here = Issue({.kind = CollectiveKind::kAllReduce, .communicator = 0});
  const SegmentEntry there = Issue({.kind = CollectiveKind::kAllReduce, .communicator = 1});
  std::vector<Plan> plans(4, With({here, there}));
  plans[3] = With({there, here});
  EXPECT_EQ(RulesIn(VerifyRanks(plans)), Rules{"deadlock"});
}

}  // namespace
}  // namespace shardplan
