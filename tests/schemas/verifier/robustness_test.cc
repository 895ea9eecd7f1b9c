// SPDX-License-Identifier: Apache-2.0
// Plans full of ids that name nothing: the verifier says so and reads nothing out of bounds (run it under the
// asan preset).
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/schemas/verifier/mutations.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

std::int32_t RandomId(std::mt19937_64& random) { return static_cast<std::int32_t>(random() % 60) - 2; }

void SpoilInstruction(Instruction& i, std::mt19937_64& random) {
  switch (random() % 9) {
    case 0:
      i.kind = static_cast<InstructionKind>(random() % 22);
      return;
    case 1:
      i.stream = RandomId(random);
      return;
    case 2:
      i.unit = RandomId(random);
      return;
    case 3:
      i.src = RandomId(random);
      return;
    case 4:
      i.dst = RandomId(random);
      return;
    case 5:
      i.event = RandomId(random);
      return;
    case 6:
      i.communicator = RandomId(random);
      return;
    case 7:
      i.segment = RandomId(random);
      return;
    default:
      i.safe_after.Edit().push_back(RandomId(random));
      return;
  }
}

void SpoilTables(Plan& plan, std::mt19937_64& random) {
  Buffer& buffer = plan.buffers[random() % plan.buffers.size()];
  switch (random() % 6) {
    case 0:
      buffer.unit = RandomId(random);
      return;
    case 1:
      buffer.role = static_cast<BufferRole>(random() % 13);
      return;
    case 2:
      buffer.parameters = {RandomId(random), RandomId(random)};
      return;
    case 3:
      buffer.persistent = !buffer.persistent;
      return;
    case 4:
      plan.segments[random() % plan.segments.size()].grads.push_back(
          {RandomId(random) % 3, RandomId(random) % 3});
      return;
    default:
      plan.steady_step = RandomId(random) % 3;
      return;
  }
}

TEST(Robustness, SpoiledPlansAreReadWithoutHarm) {
  int rejected = 0;
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    std::mt19937_64 random(seed);
    Plan plan = random() % 2 == 0
                    ? test::Fsdp2LikePlan({.units = 2, .replicas = 1 + static_cast<int>(random() % 2)})
                    : test::Fsdp1LikePlan({.units = 2, .offload = random() % 2 == 0});
    const Plan good = plan;
    const std::vector<test::Spot> spots = test::AllSpots(plan);
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int c = 0; c < changes; ++c) {
      SpoilInstruction(test::InstructionAt(plan, spots[random() % spots.size()]), random);
      if (random() % 3 == 0) SpoilTables(plan, random);
    }
    const std::vector<Violation> violations = Verify(plan);
    for (const Violation& v : violations) {
      EXPECT_TRUE(Explain(plan, v).starts_with(std::string(Name(v.rule)) + ": ")) << "seed " << seed;
    }
    rejected += violations.empty() ? 0 : 1;
    EXPECT_TRUE(std::ranges::is_sorted(
        violations, {}, [](const Violation& v) { return std::tuple(v.step, v.trigger, v.instruction); }))
        << "seed " << seed;
    std::vector<Plan> ranks(static_cast<std::size_t>(plan.world_size), good);
    ranks.back() = plan;
    EXPECT_GE(VerifyRanks(ranks).size(), violations.size()) << "seed " << seed;
  }
  EXPECT_GT(rejected, 1000);
}

TEST(Robustness, AViolationOfAnotherPlanIsExplainedWithoutItsPlace) {
  const Violation violation = {Rule::kLeak, 7, 8, 9, "something leaks", {"a", "b"}};
  EXPECT_EQ(Explain(test::Fsdp2LikePlan({}), violation), "leak: something leaks\n  a\n  b\n");
}

TEST(Robustness, AnEmptyPlanVerifies) { EXPECT_TRUE(Verify(Plan{}).empty()); }

}  // namespace
}  // namespace shardplan
