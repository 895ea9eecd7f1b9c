// SPDX-License-Identifier: Apache-2.0
// A sample of the changes of every field (tools/nightly goes through all): nothing that the verifier
// accepts goes wrong, and what it refuses goes wrong, says what is not so, or is work for nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/program.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/edits.h"
#include "tests/executor/virtual/field_mutations.h"
#include "tests/executor/virtual/mutations.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kFieldSeedsToFind = 1500;  // stops at the first that goes wrong
constexpr std::uint64_t kFieldSeedsToTrust = 3;

struct Sample {
  std::string name;
  std::uint64_t stride = 1;
};
const std::vector<Sample> kSamples = {{"knob/fsdp2/reshard_2_bf16", 151},
                                      {"knob/fsdp2/offload_accumulation", 151},
                                      {"knob/fsdp2/adamw1", 89},
                                      {"knob/fsdp2/owners_3_bf16", 61},
                                      {"knob/fsdp2/owners_hsdp_buckets", 151},
                                      {"knob/fsdp2/owners_all_buckets", 151},
                                      {"knob/fsdp1/hybrid_shard1", 151},
                                      {"golden/fsdp2/no_sync_mixed_precision", 211},
                                      {"golden/fsdp1/optimizer_in_backward_offload", 89},
                                      {"golden/fsdp2/extension_fp8", 89}};

PlanCase CaseOf(const std::string& name) {
  if (name.starts_with("golden/")) return GoldenCase(name);
  if (name.starts_with("fsdp")) return RecordedCase(name);
  std::vector<PlanCase> cases = KnobCases();
  return *std::ranges::find(cases, name, &PlanCase::name);
}

class FieldMutations : public ::testing::TestWithParam<Sample> {};

TEST_P(FieldMutations, VerifierAndVirtualMachineAgree) {
  const PlanCase c = CaseOf(GetParam().name);
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned) << ToString(planned.error());
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  const PlanJudge judge(planned->plan, expected, {}, kFieldSeedsToFind, kFieldSeedsToTrust);
  std::map<Verdict, int> verdicts;
  ForEachFieldMutation(planned->plan, 0, GetParam().stride, [&](const FieldMutation& mutation) {
    const Judgement judgement = judge.Judge(mutation);
    ++verdicts[judgement.verdict];
    EXPECT_TRUE(judgement.verdict != Verdict::kMissedByVirtual &&
                judgement.verdict != Verdict::kMissedByVerifier)
        << mutation.what << "\n  verifier: " << judgement.verifier << "\n  run: " << judgement.run << " ("
        << judgement.seeds << " seeds)";
  });
  EXPECT_GT(verdicts[Verdict::kCaught], 10);
  EXPECT_GT(verdicts[Verdict::kHarmless], 3);
}

INSTANTIATE_TEST_SUITE_P(Virtual, FieldMutations, ::testing::ValuesIn(kSamples), [](const auto& info) {
  std::string name = info.param.name;
  std::ranges::replace(name, '/', '_');
  return name;
});

// Two edits at once, which may hide each other, of the steps and of what is done on demand: whatever of it
// verifies is right. (tools/nightly tries many more.)
TEST_P(FieldMutations, NoPairOfEditsIsAcceptedAndWrong) {
  constexpr std::uint64_t kPairs = 150;
  const PlanCase c = CaseOf(GetParam().name);
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned) << ToString(planned.error());
  const OnDemandProgram on_demand = OnDemandProgramOf(planned->plan);
  std::map<Verdict, int> verdicts;
  for (const Plan* plan : {&planned->plan, &on_demand.plan}) {
    const bool is_program = plan == &on_demand.plan;
    if (is_program && !HasNumbersOnDemand(planned->plan, c.trace)) continue;
    const Plan of_trace = is_program ? WithPassesOfTrace(*plan) : *plan;
    ExpectedValues expected(of_trace, c.trace, is_program ? OnDemandStepsWithNumbers(*plan) : c.steps);
    const PlanJudge judge(*plan, expected, {}, 1, kFieldSeedsToTrust);
    for (std::uint64_t seed = 0; seed < kPairs; ++seed) {
      const FieldMutation edited = RandomEdits(*plan, seed, 2);
      const Judgement judgement = judge.Judge(edited);
      ++verdicts[judgement.verdict];
      EXPECT_NE(judgement.verdict, Verdict::kMissedByVerifier)
          << "seed " << seed << ": " << edited.what << "\n  run: " << judgement.run;
    }
  }
  EXPECT_GT(verdicts[Verdict::kCaught], 30);
  EXPECT_GT(verdicts[Verdict::kHarmless], 10);
}

// A change of a field makes another plan, and only there.
TEST(FieldMutations, AreAllDifferent) {
  const PlanCase c = CaseOf("knob/fsdp2/ranks2");
  const Plan plan = MakePlan(c.trace, c.strategy, c.cluster)->plan;
  std::map<std::string, int> kinds;
  ForEachFieldMutation(plan, 0, 1, [&](const FieldMutation& mutation) {
    EXPECT_FALSE(mutation.plan == plan) << mutation.what;
    ++kinds[mutation.kind.substr(mutation.kind.find(": ") + 2)];
  });
  for (const char* kind : {"left out",    "twice",      "behind the next one",
                           "stream",      "unit",       "src",
                           "dst",         "event",      "communicator",
                           "segment",     "microbatch", "reduce_op",
                           "divisor",     "safe_after", "kind",
                           "role",        "dtype",      "dtype and size",
                           "parts_bytes", "parameters", "memory",
                           "persistent",  "pool",       "pass",
                           "begin",       "end",        "forward"}) {
    EXPECT_GT(kinds[kind], 0) << kind;
  }
}

// Changes that were accepted once.

Plan PlanOf(const std::string& name) {
  const PlanCase c = CaseOf(name);
  Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  if (!planned) throw std::runtime_error(ToString(planned.error()));
  return std::move(planned->plan);
}

// In the call that copies parameters to the host, each wait before the record that it is for.
TEST(FieldMutations, TheHostWaitsForWhatTheUserReads) {
  const Plan plan = PlanOf("golden/fsdp1/summon_full_params_on_host");
  int swaps = 0;
  for (std::size_t t = 0; t < plan.steps.back().triggers.size(); ++t) {
    const Trigger& trigger = plan.steps.back().triggers[t];
    if (trigger.kind != TriggerKind::kUserCall || trigger.occurrence > 0) continue;
    for (std::size_t k = 1; k + 1 < trigger.instructions.size(); ++k) {
      if (trigger.instructions[k - 1].kind != InstructionKind::kCopyToHost ||
          trigger.instructions[k].kind != InstructionKind::kRecord ||
          trigger.instructions[k + 1].kind != InstructionKind::kHostWait) {
        continue;
      }
      Plan swapped = plan;
      std::vector<Instruction>& moved = swapped.steps.back().triggers[t].instructions.Edit();
      std::swap(moved[k], moved[k + 1]);
      EXPECT_FALSE(Verify(swapped).empty()) << k;
      ++swaps;
    }
  }
  EXPECT_EQ(swaps, static_cast<int>(plan.units.size()));
}

TEST(FieldMutations, ASegmentThatOnlyReadsRunsOnce) {
  Plan plan = PlanOf("fsdp2/uneven_default_w3");
  int doubled = 0;
  for (Trigger& trigger : plan.steps.back().triggers) {
    for (std::size_t k = 0; k < trigger.instructions.size(); ++k) {
      const Instruction i = trigger.instructions[k];
      if (i.kind != InstructionKind::kCompute ||
          plan.segments[i.segment].begin < plan.segments[i.segment].end) {
        continue;
      }
      const InstructionList before = trigger.instructions;
      std::vector<Instruction>& all = trigger.instructions.Edit();
      all.insert(all.begin() + static_cast<std::ptrdiff_t>(k), i);
      const std::vector<Violation> found = Verify(plan);
      EXPECT_TRUE(
          std::ranges::any_of(found, [](const Violation& v) { return v.rule == Rule::kComputeOrder; }));
      trigger.instructions = before;
      ++doubled;
    }
  }
  EXPECT_GT(doubled, 0);
}

// Left where they were reduced, in the original dtype, though the strategy keeps gradients in the low
// precision.
TEST(FieldMutations, TheOptimizerStepsInTheLowPrecisionThatIsKept) {
  const Plan plan = PlanOf("golden/fsdp1/keep_low_precision_grads");
  std::set<BufferId> kept;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].name.ends_with(".grad_sharded.low_precision")) kept.insert(static_cast<BufferId>(b));
  }
  ASSERT_EQ(kept.size(), plan.units.size());
  for (const BufferId low : kept) {
    Plan left = plan;
    std::set<BufferId> cast;
    for (PlanStep& step : left.steps) {
      for (Trigger& trigger : step.triggers) {
        const auto is_cast = [&](const Instruction& i) {
          if (i.kind == InstructionKind::kGradCast && i.dst == low) cast.insert(i.src);
          return i.dst == low || i.src == low || (i.kind == InstructionKind::kFree && cast.contains(i.src));
        };
        if (std::ranges::any_of(trigger.instructions, is_cast)) {
          std::erase_if(trigger.instructions.Edit(), is_cast);
        }
      }
    }
    const std::vector<Violation> found = Verify(left);
    EXPECT_TRUE(std::ranges::any_of(found, [](const Violation& v) { return v.rule == Rule::kOptimizerStep; }))
        << plan.buffers[low].name;
  }
}

// A unit of NO_SHARD, whose shard is the whole parameter: modules that are bound to it as to a shard do not
// run.
TEST(FieldMutations, ModulesBoundToShardsAreBoundToWholeParametersWhenTheyRun) {
  Plan plan = OnDemandProgramOf(PlanOf("fsdp1/gptish_noshard")).plan;
  const auto reads_shards = [&] {
    return std::ranges::any_of(Verify(plan),
                               [](const Violation& v) { return v.rule == Rule::kUseBeforeUnshard; });
  };
  EXPECT_FALSE(reads_shards());
  int changed = 0;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) {
      for (std::size_t k = 0; k < trigger.instructions.size(); ++k) {
        const Instruction& i = trigger.instructions[k];
        if (i.kind != InstructionKind::kBindUnsharded || i.unit != 1) continue;
        trigger.instructions.Edit()[k].kind = InstructionKind::kBindSharded;
        ++changed;
      }
    }
  }
  EXPECT_GT(changed, 0);
  EXPECT_TRUE(reads_shards());
}

// On four ranks: as many bytes as the shard of all four has in float32.
TEST(FieldMutations, AGatherOfASmallerMeshTakesItsPieces) {
  Plan plan = PlanOf("knob/fsdp2/reshard_2_bf16");
  int changed = 0;
  for (Buffer& buffer : plan.buffers) {
    if (!buffer.name.ends_with(".all_gather_input.post_forward")) continue;
    buffer.dtype = DType::kFloat32;
    EXPECT_FALSE(Verify(plan).empty()) << buffer.name;
    buffer.dtype = DType::kBFloat16;
    ++changed;
  }
  EXPECT_GT(changed, 0);
}

}  // namespace
}  // namespace shardplan::test
