// SPDX-License-Identifier: Apache-2.0
// Every wait, record, host wait, free and collective of planner-made plans, broken one at a time: what the
// verifier objects to goes wrong in some order of execution, what it accepts never does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/plan_text.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/effects.h"
#include "tests/executor/virtual/mutations.h"
#include "tests/executor/virtual/plan_cases.h"

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
                                         "knob/fsdp2/checkpoint_around_units",
                                         "knob/fsdp2/owners_3_bf16",
                                         "knob/fsdp2/owners_dist_muon",
                                         "knob/fsdp2/owners_in_backward",
                                         "knob/fsdp2/owners_hsdp_buckets",
                                         "knob/fsdp2/owners_all_buckets"};

class PlanMutations : public ::testing::TestWithParam<PlanCase> {};

TEST_P(PlanMutations, VerifierAndVirtualMachineAgree) {
  const PlanCase& c = GetParam();
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned) << ToString(planned.error());
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  const PlanJudge judge(planned->plan, expected, {}, kSeedsToFind, kSeedsToTrust);
  std::array<int, kMutationKinds> caught = {};
  for (const Mutation& mutation : MutationsOf(planned->plan)) {
    const Judgement judgement = judge.Judge(mutation);
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

std::vector<PlanCase> MutatedCases() {
  std::vector<PlanCase> cases = KnobCases();
  std::erase_if(cases, [](const PlanCase& c) { return std::ranges::count(kCases, c.name) == 0; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Virtual, PlanMutations, ::testing::ValuesIn(MutatedCases()), [](const auto& info) {
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

// Work that no number depends on: all-reduces of one rank, the prefetch of a unit whose backward needs
// nothing.
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

TEST(PlanMutations, AllCasesAreThere) { EXPECT_EQ(MutatedCases().size(), kCases.size()); }

// The plan of a knob, and runs of it with other instructions.
class KnobPlan {
 public:
  explicit KnobPlan(const std::string& name) {
    for (PlanCase& c : KnobCases()) {
      if (c.name == name) case_ = std::move(c);
    }
    plan_ = MakePlan(case_.trace, case_.strategy, case_.cluster)->plan;
    expected_ = std::make_unique<ExpectedValues>(plan_, case_.trace, case_.steps);
  }
  const Plan& plan() const { return plan_; }
  std::string FirstFailure(const Plan& plan, const Plan* last_rank_plan = nullptr) {
    std::string failure;
    for (std::uint64_t seed = 1; seed <= kSeedsToFind && failure.empty(); ++seed) {
      const Findings findings = RunChecked(plan, *expected_, seed, last_rank_plan);
      failure = findings.failure.empty() && !findings.stale.empty() ? "stale parameters" : findings.failure;
    }
    return failure;
  }

 private:
  PlanCase case_;
  Plan plan_;
  std::unique_ptr<ExpectedValues> expected_;
};

TEST(LeftOut, AnyMoveIsFound) {
  for (const std::string name :
       {"knob/fsdp2/reshard_2_bf16", "knob/fsdp2/bf16_hsdp", "knob/fsdp1/full_shard1",
        "knob/fsdp2/owners_hsdp_buckets", "knob/fsdp2/owners_all_buckets"}) {
    KnobPlan knob(name);
    int tried = 0;
    const std::vector<Trigger>& triggers = knob.plan().steps.back().triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
        using enum InstructionKind;
        const InstructionKind kind = triggers[t].instructions[i].kind;
        if (kind != kCopyIn && kind != kAllGather && kind != kCopyOut && kind != kGradCopyIn &&
            kind != kReduceScatter && kind != kAllReduce && kind != kGradCast && kind != kAllocate &&
            kind != kBindUnsharded && kind != kUpdateCopyIn && kind != kAllToAll && kind != kUpdateGather &&
            kind != kOrthogonalize && kind != kUpdateApply) {
          continue;
        }
        Plan other = knob.plan();
        std::vector<Instruction>& instructions = other.steps.back().triggers[t].instructions.Edit();
        instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(i));
        EXPECT_NE(knob.FirstFailure(other), "")
            << name << ": " << Describe(knob.plan(), triggers[t].instructions[i]);
        ++tried;
      }
    }
    EXPECT_GT(tried, 20);
  }
}

// Without a model, which would find a wrong number first.
TEST(LeftOut, TheLastCollectiveOfOneRankIsADeadlock) {
  const KnobPlan knob("knob/fsdp2/ranks2");
  Plan other = knob.plan();
  std::vector<Trigger>& triggers = other.steps.front().triggers;
  const auto reduces = [](const Instruction& i) { return i.kind == InstructionKind::kReduceScatter; };
  const auto last = std::find_if(triggers.rbegin(), triggers.rend(), [&](const Trigger& t) {
    return std::ranges::any_of(t.instructions, reduces);
  });
  ASSERT_NE(last, triggers.rend());
  std::erase_if(last->instructions.Edit(), reduces);
  const auto machine = executor::VirtualMachine::Create(knob.plan(), 1);
  std::vector<std::unique_ptr<executor::Replayer>> replayers;
  for (const std::int64_t rank : {0, 1}) {
    auto replayer = executor::Replayer::Create(rank == 0 ? knob.plan() : other, rank, machine->device(rank),
                                               machine->collectives(rank));
    ASSERT_TRUE(replayer) << ToString(replayer.error());
    replayers.push_back(std::move(*replayer));
  }
  const std::vector<executor::Replayer*> pointers = {replayers[0].get(), replayers[1].get()};
  const Status status = executor::ReplayOnVirtual(*machine, pointers, 1);
  ASSERT_FALSE(status);
  EXPECT_THAT(
      status.error().message,
      ::testing::ContainsRegex("deadlock: rank 0, .*: collective [0-9]+ on communicator .*reduce_scatter"));
}

// One rank gathers a unit only after a collective that the others issue behind it.
TEST(SwappedCollectives, RanksThatIssueDifferentOnesAreNamed) {
  KnobPlan knob("knob/fsdp2/ranks2");
  for (const Mutation& mutation : MutationsOf(knob.plan())) {
    if (mutation.kind != MutationKind::kSwappedCollectives) continue;
    const Plan other = Mutated(knob.plan(), mutation);
    const std::string failure = knob.FirstFailure(knob.plan(), &other);
    EXPECT_THAT(failure, ::testing::AnyOf(::testing::HasSubstr("ranks issue different ones"),
                                          ::testing::HasSubstr("while it is not allocated")))
        << Describe(knob.plan(), mutation);
  }
}

}  // namespace
}  // namespace shardplan::test
