// SPDX-License-Identifier: Apache-2.0
// Frees of some parts of a buffer: what may still be done with the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/schemas/verifier/mutations.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using enum InstructionKind;

class FreedParts : public ::testing::Test {
 protected:
  // The gradients of every unit in two parts of which one is freed before the other.
  FreedParts() : plan_(test::Fsdp2LikePlan({.units = 2, .parameters = 2})) {
    for (PlanStep& step : plan_.steps) {
      for (Trigger& trigger : step.triggers) SplitFrees(trigger.instructions.Edit());
    }
  }

  void SplitFrees(std::vector<Instruction>& instructions) const {
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      if (!FreesGradients(instructions[i])) continue;
      Instruction part = instructions[i];
      part.parts = {1};
      instructions.insert(instructions.begin() + static_cast<std::ptrdiff_t>(i++), part);
    }
  }
  bool FreesGradients(const Instruction& i) const {
    return i.kind == kFree && plan_.buffers[i.src].role == BufferRole::kGradUnsharded;
  }

  // The first free of a part in the steady step.
  test::Spot FirstSpot() const {
    for (const test::Spot spot : test::SpotsOf(plan_, kFree)) {
      if (spot.step == 1 && !test::InstructionAt(plan_, spot).parts.empty()) return spot;
    }
    ADD_FAILURE() << "no free of a part";
    return {};
  }
  Instruction& First() { return test::InstructionAt(plan_, FirstSpot()); }

  Plan plan_;
};

TEST_F(FreedParts, GoodPlansHaveNoViolation) { EXPECT_THAT(Verify(plan_), IsEmpty()); }

TEST_F(FreedParts, NothingUsesWhatIsLeft) {
  const test::Spot free = FirstSpot();
  for (test::Spot copy : test::SpotsOf(plan_, kGradCopyIn)) {
    if (copy.step != free.step || copy.trigger != free.trigger) continue;
    std::vector<Instruction>& list = plan_.steps[copy.step].triggers[copy.trigger].instructions.Edit();
    std::swap(list[copy.instruction], list[free.instruction]);
    break;
  }
  const std::vector<Violation> violations = Verify(plan_);
  ASSERT_FALSE(violations.empty());
  EXPECT_EQ(Name(violations[0].rule), "use_after_free");
  EXPECT_THAT(violations[0].message, HasSubstr("of which parts were freed"));
}

// A shard of the smaller mesh for each of two parameters: the whole of one goes before the next one's turn.
class PartByPart : public ::testing::Test {
 protected:
  // The spot of the n-th instruction of the kind that works on this buffer in the steady step.
  test::Spot SpotOf(InstructionKind kind, const std::string& src, std::size_t n = 0) const {
    for (const test::Spot spot : test::SpotsOf(plan_, kind)) {
      if (spot.step != 1 || plan_.buffers[test::InstructionAt(plan_, spot).src].name != src) continue;
      if (n-- == 0) return spot;
    }
    ADD_FAILURE() << "no such instruction";
    return {};
  }

  Plan plan_ = test::Fsdp2LikePlan({.units = 2, .parameters = 2, .reshard_to_shards = true});
};

TEST_F(PartByPart, CopiesUseTheOtherParts) {
  EXPECT_THAT(Verify(plan_), IsEmpty());
  test::InstructionAt(plan_, SpotOf(kFree, "layers.0.param_unsharded")).parts = {1};
  const std::vector<Violation> violations = Verify(plan_);
  ASSERT_FALSE(violations.empty());
  EXPECT_EQ(Name(violations[0].rule), "use_after_free");
  EXPECT_THAT(violations[0].message, HasSubstr("reshard_post_forward"));
}

TEST_F(PartByPart, ABufferIsFilledWhenAllItsParametersWereCopied) {
  for (const char* shard : {"layers.0.param_post_forward_shard.p0", "layers.0.param_post_forward_shard.p1"}) {
    const std::vector<Violation> violations = Verify(test::Without(plan_, SpotOf(kCopyIn, shard)));
    ASSERT_FALSE(violations.empty()) << shard;
    EXPECT_EQ(Name(violations[0].rule), "read_before_write");
  }
}

TEST_F(FreedParts, APartIsFreedOnce) {
  const std::vector<Violation> violations = Verify(test::Doubled(plan_, FirstSpot()));
  ASSERT_THAT(violations, SizeIs(1));
  EXPECT_EQ(Name(violations[0].rule), "double_free");
  EXPECT_THAT(violations[0].message, HasSubstr("part 1 of"));
}

TEST_F(FreedParts, FreesOfPartsDoNotEndABuffer) {
  First().parts = {0, 1};
  EXPECT_THAT(Verify(plan_), IsEmpty());
  test::Spot end = FirstSpot();
  ++end.instruction;
  const std::vector<Violation> violations = Verify(test::Without(plan_, end));
  ASSERT_FALSE(violations.empty());
  EXPECT_EQ(Name(violations[0].rule), "leak");
}

TEST_F(FreedParts, PartsAreThoseOfTheBuffer) {
  First().parts = {2};
  EXPECT_THAT(Verify(plan_)[0].message, HasSubstr("there is no such part (found 2, expected 0 to 1)"));
  First().parts = {1, 0};
  EXPECT_THAT(Verify(plan_)[0].message, HasSubstr("parts are not ascending"));
  First().parts = {1};
  for (const test::Spot spot : test::SpotsOf(plan_, kAllocate)) test::InstructionAt(plan_, spot).parts = {0};
  EXPECT_THAT(Verify(plan_)[0].message, HasSubstr("only a free has parts"));
}

}  // namespace
}  // namespace shardplan
