// Every wait, record, host wait, free and collective of planner-made plans, broken one at a time: what the
// verifier objects to goes wrong in some order of execution, what it accepts never does.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "tests/virtual/effects.h"
#include "tests/virtual/mutations.h"
#include "tests/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeedsToFind = 3000;  // stops at the first that goes wrong
constexpr std::uint64_t kSeedsToTrust = 6;

// One of each kind of schedule: streams, layouts, rate limiter, replicas, accumulation, offloading.
const std::vector<std::string> kCases = {"knob/fsdp2/ranks2",
                                         "knob/fsdp2/reshard_2_bf16",
                                         "knob/fsdp2/hsdp_accumulate_no_all_reduce_bfloat16",
                                         "knob/fsdp2/prefetch2",
                                         "knob/fsdp2/offload",
                                         "knob/fsdp2/accumulate_no_sync_bf16",
                                         "knob/fsdp1/full_shard2",
                                         "knob/fsdp1/shard_grad_op1",
                                         "knob/fsdp1/hybrid_shard1",
                                         "knob/fsdp1/no_shard1",
                                         "knob/fsdp2/unshard_async_op",
                                         "knob/fsdp2/checkpoint_around_units"};

class PlanMutations : public testing::TestWithParam<PlanCase> {};

TEST_P(PlanMutations, VerifierAndVirtualMachineAgree) {
  const PlanCase& c = GetParam();
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned) << ToString(planned.error());
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  std::array<int, kMutationKinds> caught = {};
  for (const Mutation& mutation : MutationsOf(planned->plan)) {
    const Judgement judgement = Judge(planned->plan, mutation, expected, {}, kSeedsToFind, kSeedsToTrust);
    if (judgement.verdict == Verdict::kCaught) ++caught[static_cast<int>(mutation.kind)];
    EXPECT_TRUE(judgement.verdict != Verdict::kMissedByVirtual &&
                judgement.verdict != Verdict::kMissedByVerifier)
        << Describe(planned->plan, mutation) << "\n  verifier: " << judgement.verifier
        << "\n  run: " << judgement.run << " (" << judgement.seeds << " seeds)";
  }
  for (const MutationKind kind : {MutationKind::kRemovedWait, MutationKind::kRemovedRecord,
                                  MutationKind::kEarlyFree, MutationKind::kSwappedCollectives}) {
    EXPECT_GT(caught[static_cast<int>(kind)], 5) << Name(kind);
  }
}

std::vector<PlanCase> Cases() {
  std::vector<PlanCase> cases = KnobCases();
  std::erase_if(cases, [](const PlanCase& c) { return std::ranges::count(kCases, c.name) == 0; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Virtual, PlanMutations, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.name.substr(5);
  std::ranges::replace(name, '/', '_');
  return name;
});

std::int64_t CountOf(const Plan& plan, InstructionKind kind) {
  std::int64_t count = 0;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers)
      count += std::ranges::count(trigger.instructions, kind, &Instruction::kind);
  }
  return count;
}

// What no number depends on: all-reduces of one rank, the prefetch of a unit whose backward needs nothing.
TEST(IdleWork, IsWhatNobodyReadsAndNothingElse) {
  const auto plan_of = [](const std::string& name) {
    const PlanCase c = GoldenCase(name);
    return MakePlan(c.trace, c.strategy, c.cluster, {.verify = false})->plan;
  };
  const Plan alone = plan_of("golden/fsdp1/one_rank");
  EXPECT_GT(CountOf(alone, InstructionKind::kAllReduce), 0);
  EXPECT_EQ(CountOf(WithoutIdleWork(alone, false), InstructionKind::kAllReduce), 0);
  const Plan frozen = plan_of("golden/fsdp2/frozen_prefix");
  EXPECT_EQ(WithoutIdleWork(frozen, false), frozen);
  EXPECT_LT(CountOf(WithoutIdleWork(frozen, true), InstructionKind::kAllGather),
            CountOf(frozen, InstructionKind::kAllGather));
  const Plan plan = plan_of("golden/fsdp2/hsdp");
  EXPECT_EQ(WithoutIdleWork(plan, true), plan);
}

TEST(PlanMutations, AllCasesAreThere) { EXPECT_EQ(Cases().size(), kCases.size()); }

}  // namespace
}  // namespace shardplan::test
