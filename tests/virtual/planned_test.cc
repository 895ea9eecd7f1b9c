// What the planner makes of every recording of PyTorch, of every knob and of random models computes the right
// numbers in whatever order the streams run. What PyTorch itself gets wrong is named, case by case.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/verifier.h"
#include "tests/virtual/checked_run.h"
#include "tests/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeeds = 12;
constexpr std::uint32_t kRandomCases = 80;

// fsdp1: gradients copied to the host, and optimizers that step inside the backward, are not planned.
const std::set<std::string> kNotPlanned = {"fsdp1/gptish_offload", "fsdp1/gptish_optim_bwd"};

// Parameters that are read as they were before an optimizer step, as PyTorch reads them.
const std::map<std::string, std::set<std::string>> kStale = {
    // Never resharded: what a backward gathered is what the next forward computes with, and the root's
    // parameters are those of the first step for ever.
    {"knob/fsdp2/never_reshard_after_backward",
     {"(root) is read 1 optimizer step(s) old", "(root) is read 2 optimizer step(s) old",
      "layers.0 is read 1 optimizer step(s) old", "layers.1 is read 1 optimizer step(s) old",
      "layers.2 is read 1 optimizer step(s) old"}},
};

// Runs the case under some seeds: all right, and under each the same stale reads.
void Check(const PlanCase& c, std::uint64_t seeds) {
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster, {.verify = false});
  ASSERT_TRUE(planned) << ToString(planned.error());
  for (const Violation& violation : Verify(planned->plan)) {
    ADD_FAILURE() << Explain(planned->plan, violation);
  }
  const auto stale = kStale.find(c.name);
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const Findings findings = RunChecked(planned->plan, expected, seed);
    ASSERT_EQ(findings.failure, "") << c.name << ", seed " << seed;
    ASSERT_EQ(findings.stale, stale == kStale.end() ? std::set<std::string>{} : stale->second)
        << c.name << ", seed " << seed;
  }
}

std::string TestName(std::string name) {
  std::ranges::replace_if(
      name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
}

std::vector<std::string> PlannedRecordings() {
  std::vector<std::string> names = RecordedNames();
  std::erase_if(names, [](const std::string& name) { return kNotPlanned.contains(name); });
  return names;
}

class RecordedPlans : public testing::TestWithParam<std::string> {};
TEST_P(RecordedPlans, ComputeTheRightNumbers) { Check(RecordedCase(GetParam()), kSeeds); }
INSTANTIATE_TEST_SUITE_P(Virtual, RecordedPlans, testing::ValuesIn(PlannedRecordings()),
                         [](const auto& info) { return TestName(info.param); });

class KnobPlans : public testing::TestWithParam<PlanCase> {};
TEST_P(KnobPlans, ComputeTheRightNumbers) { Check(GetParam(), kSeeds); }
INSTANTIATE_TEST_SUITE_P(Virtual, KnobPlans, testing::ValuesIn(KnobCases()),
                         [](const auto& info) { return TestName(info.param.name.substr(5)); });

TEST(RandomPlans, ComputeTheRightNumbers) {
  for (std::uint32_t seed = 0; seed < kRandomCases; ++seed) Check(RandomCase(seed), 4);
}

// The checks can fail: one wrong number in a shard.
TEST(CheckedRun, AWrongNumberIsFound) {
  const PlanCase c = RecordedCase("fsdp2/mlp3_default_w2");
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
  ASSERT_TRUE(planned);
  Plan other = planned->plan;
  for (Trigger& trigger : other.steps[0].triggers) {
    for (Instruction& instruction : trigger.instructions) {
      if (instruction.kind == InstructionKind::kReduceScatter) instruction.reduce_op = ReduceOp::kSum;
    }
  }
  ExpectedValues expected(planned->plan, c.trace, c.steps);
  EXPECT_THAT(RunChecked(other, expected, 1).failure, testing::HasSubstr("optimizer step: element 0 of"));
}

}  // namespace
}  // namespace shardplan::test
