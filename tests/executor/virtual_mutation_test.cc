// The virtual machine against the verifier: whatever the verifier objects to in a mutated plan goes wrong
// under some seed, and what it accepts (a wait that another one implies) never does. The two know nothing of
// each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"
#include "tests/executor/sharded_plan.h"
#include "tests/executor/virtual_runner.h"

namespace shardplan::test {
namespace {

constexpr std::uint64_t kSeedsToFind = 400;  // stops at the first that goes wrong
constexpr std::uint64_t kSeedsToTrust = 10;
constexpr std::int64_t kSteps = 2;

std::vector<ShardedPlanOptions> Cases() {
  return {{.shards = 2},
          {.shards = 2, .rate_limiter = true},
          {.shards = 2, .replicas = 2, .param_dtype = DType::kBFloat16},
          {.shards = 4, .post_forward = 2},
          {.shards = 2, .flat = true, .param_dtype = DType::kBFloat16}};
}

std::string FirstFailure(const Plan& plan, std::uint64_t seeds) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const std::string failure = RunOnVirtual(plan, seed, kSteps);
    if (!failure.empty()) return "seed " + std::to_string(seed) + ": " + failure;
  }
  return {};
}

struct Counts {
  int found = 0;
  int harmless = 0;
};

void CheckAgainstVerifier(const Plan& mutated, const std::string& what, Counts& counts) {
  const bool objects = !Verify(mutated).empty();
  const std::string failure = FirstFailure(mutated, objects ? kSeedsToFind : kSeedsToTrust);
  if (objects) {
    EXPECT_NE(failure, "") << what << ": the verifier says: " << Verify(mutated).front().message;
    ++counts.found;
  } else {
    EXPECT_EQ(failure, "") << what << ": the verifier does not object";
    ++counts.harmless;
  }
}

using Position = std::pair<std::size_t, std::size_t>;  // trigger, instruction

// Calls mutate(trigger's instructions, position) on a fresh copy of the plan for each instruction that it may
// apply to. `mutate` returns false when there is nothing to do.
Counts ForEachMutation(const Plan& plan,
                       const std::function<bool(std::vector<Instruction>&, std::size_t)>& mutate) {
  Counts counts;
  const std::vector<Trigger>& triggers = plan.steps[0].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
      Plan mutated = plan;
      if (!mutate(mutated.steps[0].triggers[t].instructions, i)) continue;
      CheckAgainstVerifier(
          mutated, Describe(plan, triggers[t]) + ": " + Describe(plan, triggers[t].instructions[i]), counts);
    }
  }
  return counts;
}

class VirtualMutations : public testing::TestWithParam<ShardedPlanOptions> {};

TEST_P(VirtualMutations, AMissingWaitBecomesAWrongNumber) {
  const Counts counts =
      ForEachMutation(MakeShardedPlan(GetParam()), [](std::vector<Instruction>& instructions, std::size_t i) {
        const InstructionKind kind = instructions[i].kind;
        if (kind != InstructionKind::kWait && kind != InstructionKind::kHostWait) return false;
        instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(i));
        return true;
      });
  EXPECT_GT(counts.found, 5);
}

TEST_P(VirtualMutations, AFreeBeforeTheLastUseBecomesAWrongNumber) {
  const Counts counts =
      ForEachMutation(MakeShardedPlan(GetParam()), [](std::vector<Instruction>& instructions, std::size_t i) {
        if (instructions[i].kind != InstructionKind::kFree || i == 0) return false;
        std::rotate(instructions.begin(), instructions.begin() + static_cast<std::ptrdiff_t>(i),
                    instructions.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        return true;
      });
  EXPECT_GT(counts.found, 2);
}

TEST_P(VirtualMutations, AForgottenStreamOfAFreeBecomesAWrongNumber) {
  const Plan plan = MakeShardedPlan(GetParam());
  const Counts counts = ForEachMutation(plan, [](std::vector<Instruction>& instructions, std::size_t i) {
    if (instructions[i].safe_after.empty()) return false;
    instructions[i].safe_after.clear();
    return true;
  });
  if (GetParam().flat) {
    EXPECT_GT(counts.found, 2);
  }
}

TEST_P(VirtualMutations, ACopyOrReductionThatIsLeftOutIsFound) {
  const Plan plan = MakeShardedPlan(GetParam());
  int tried = 0;
  const std::vector<Trigger>& triggers = plan.steps[0].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
      using enum InstructionKind;
      const InstructionKind kind = triggers[t].instructions[i].kind;
      if (kind != kCopyIn && kind != kAllGather && kind != kCopyOut && kind != kGradCopyIn &&
          kind != kReduceScatter && kind != kAllReduce && kind != kGradCast && kind != kAllocate &&
          kind != kBindUnsharded) {
        continue;
      }
      Plan mutated = plan;
      std::vector<Instruction>& instructions = mutated.steps[0].triggers[t].instructions;
      instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(i));
      EXPECT_NE(FirstFailure(mutated, kSeedsToFind), "") << Describe(plan, triggers[t].instructions[i]);
      ++tried;
    }
  }
  EXPECT_GT(tried, 20);
}

std::string CaseName(const testing::TestParamInfo<ShardedPlanOptions>& info) { return ToString(info.param); }
INSTANTIATE_TEST_SUITE_P(Cases, VirtualMutations, testing::ValuesIn(Cases()), CaseName);

// One rank issues a prefetch after the reduce_scatter that the others issue before it.
TEST(VirtualMachine, RanksThatIssueCollectivesInDifferentOrdersAreNamed) {
  const Plan plan = MakeShardedPlan({.shards = 2});
  Plan other = plan;
  std::vector<Trigger>& triggers = other.steps[0].triggers;
  const auto before = std::ranges::find_if(
      triggers, [](const Trigger& t) { return t.kind == TriggerKind::kPreBackward && t.unit == 2; });
  const auto after = std::ranges::find_if(
      triggers, [](const Trigger& t) { return t.kind == TriggerKind::kPostBackward && t.unit == 2; });
  ASSERT_TRUE(before != triggers.end() && after != triggers.end());
  // The trigger gathers layers.2 and then, ahead of time, layers.1.
  const auto gather =
      std::find_if(before->instructions.rbegin(), before->instructions.rend(),
                   [](const Instruction& i) { return i.kind == InstructionKind::kAllGather; });
  ASSERT_NE(gather, before->instructions.rend());
  after->instructions.push_back(*gather);
  before->instructions.erase(std::next(gather).base());
  const std::string failure = RunOnVirtual(plan, 1, 1, &other);
  EXPECT_NE(failure.find("ranks issue different ones"), std::string::npos) << failure;
}

// One rank leaves out its last collective: the other waits for ever.
TEST(VirtualMachine, ACollectiveThatOneRankDoesNotIssueIsADeadlock) {
  const Plan plan = MakeShardedPlan({.shards = 2});
  Plan other = plan;
  bool removed = false;
  for (auto trigger = other.steps[0].triggers.rbegin(); trigger != other.steps[0].triggers.rend() && !removed;
       ++trigger) {
    removed = std::erase_if(trigger->instructions, [](const Instruction& i) {
                return i.kind == InstructionKind::kReduceScatter;
              }) > 0;
  }
  ASSERT_TRUE(removed);
  const std::string failure = RunOnVirtual(plan, 1, 1, &other);
  EXPECT_NE(failure.find("deadlock: rank 0, stream scatter: collective"), std::string::npos) << failure;
  EXPECT_NE(failure.find("layers.0.reduce_scatter_output"), std::string::npos) << failure;
}

}  // namespace
}  // namespace shardplan::test
