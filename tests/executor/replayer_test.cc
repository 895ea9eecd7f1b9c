// SPDX-License-Identifier: Apache-2.0
// Checks of the replayer: the order of triggers, the rank, the plan's buffers; and how shards are cut.
#include "shardplan/executor/replayer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "shardplan/executor/virtual_backend.h"
#include "shardplan/schemas/layout.h"
#include "tests/executor/step_plan.h"

namespace shardplan::executor {
namespace {

using testing::ElementsAre;
using ::testing::HasSubstr;

class ReplayerTest : public ::testing::Test {
 protected:
  Result<std::unique_ptr<Replayer>> Make(Model* model = nullptr, std::int64_t rank = 0) {
    machine_ = VirtualMachine::Create(plan_, 1);
    return Replayer::Create(plan_, rank, machine_->device(0), machine_->collectives(0), model);
  }

  Plan plan_ = test::MakeStepPlan(2);
  std::unique_ptr<VirtualMachine> machine_;
};

TEST_F(ReplayerTest, ATriggerThatIsNotTheNextOneNamesFoundAndExpected) {
  auto replayer = Make();
  ASSERT_TRUE(replayer.has_value());
  ASSERT_TRUE((*replayer)->Fire({TriggerKind::kStepBegin, -1, 0}).has_value());
  const Status status = (*replayer)->Fire({TriggerKind::kPreForward, 1, 0});
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kNegative);
  EXPECT_THAT(status.error().found, HasSubstr("layers.0"));
  EXPECT_THAT(status.error().expected, HasSubstr("(root)"));
  EXPECT_EQ(status.error().pointer, "/steps/0/triggers/1");
}

TEST_F(ReplayerTest, AfterAnErrorEveryCallReturnsThatError) {
  auto replayer = Make();
  ASSERT_TRUE(replayer.has_value());
  const Status first = (*replayer)->Fire({TriggerKind::kBackwardEnd, -1, 0});
  const Status second = (*replayer)->Fire({TriggerKind::kStepBegin, -1, 0});
  ASSERT_FALSE(first.has_value());
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(first.error(), second.error());
}

TEST_F(ReplayerTest, ARankOutsideTheWorldIsAUsageError) {
  const auto replayer = Make(nullptr, 2);
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().code, ErrorCode::kUsage);
  EXPECT_EQ(replayer.error().found, "rank 2");
}

TEST_F(ReplayerTest, ABufferThatIsTooSmallForItsParametersIsNamedWithBothSizes) {
  const auto buffer = std::ranges::find_if(
      plan_.buffers, [](const Buffer& b) { return b.role == BufferRole::kReduceScatterInput; });
  buffer->parts_bytes[0].value -= 8;
  const auto replayer = Make();
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(replayer.error().pointer,
            "/buffers/" + std::to_string(buffer - plan_.buffers.begin()) + "/parts_bytes/0");
  EXPECT_NE(replayer.error().found, replayer.error().expected);
}

TEST_F(ReplayerTest, AParameterThatItsUnitHasNotIsLocated) {
  const Plan good = plan_;
  const auto buffer = std::ranges::find_if(
      plan_.buffers, [](const Buffer& b) { return b.role == BufferRole::kGradUnsharded; });
  const std::string pointer = "/buffers/" + std::to_string(buffer - plan_.buffers.begin());
  buffer->parameters = {0, 1'000};
  auto replayer = Make();
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(replayer.error().pointer, pointer + "/parameters/1");
  buffer->unit = 1'000;
  replayer = Make();
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().pointer, pointer + "/unit");
  plan_ = good;
  const auto backward =
      std::ranges::find_if(plan_.segments, [](const Segment& s) { return !s.grads.empty(); });
  ASSERT_NE(backward, plan_.segments.end());
  backward->grads[0].parameter = 1'000;
  replayer = Make();
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().pointer,
            "/segments/" + std::to_string(backward - plan_.segments.begin()) + "/grads/0/parameter");
}

TEST_F(ReplayerTest, AnIdOutOfRangeIsLocated) {
  plan_.steps[0].triggers[1].instructions.Edit()[0].event = 10'000;
  const auto replayer = Make();
  ASSERT_FALSE(replayer.has_value());
  EXPECT_EQ(replayer.error().pointer, "/steps/0/triggers/1/instructions/0");
  EXPECT_EQ(replayer.error().found, "10000");
}

// A model that runs itself computes after the trigger; nothing may be issued behind it.
TEST_F(ReplayerTest, AModelThatRunsItselfRefusesInstructionsAfterItsCompute) {
  class SelfRunning final : public Model {
   public:
    bool RunsItself() const override { return true; }
  } model;
  ASSERT_TRUE(Make(&model).has_value());
  const auto computes = std::ranges::find_if(plan_.steps[0].triggers, [](const Trigger& t) {
    return t.instructions.size() > 1 && t.instructions.back().kind == InstructionKind::kCompute;
  });
  ASSERT_NE(computes, plan_.steps[0].triggers.end());
  std::vector<Instruction>& instructions = computes->instructions.Edit();
  std::swap(instructions.back(), *(instructions.end() - 2));
  const auto replayer = Make(&model);
  ASSERT_FALSE(replayer.has_value());
  EXPECT_THAT(replayer.error().message, HasSubstr("follows a compute instruction"));
}

TEST(Layout, PiecesAreCutAsTorchChunkCutsThem) {
  const auto counts = [](std::int64_t rows, std::int64_t pieces) {
    std::vector<std::int64_t> found;
    for (std::int64_t i = 0; i < pieces; ++i) found.push_back(ChunkRows(rows, pieces, i).count);
    return found;
  };
  EXPECT_THAT(counts(4, 3), ElementsAre(2, 2, 0));
  EXPECT_THAT(counts(5, 3), ElementsAre(2, 2, 1));
  EXPECT_THAT(counts(1, 4), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(counts(8, 4), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(counts(0, 2), ElementsAre(0, 0));
}

TEST(Layout, APieceIsPaddedToTheFirstOne) {
  UnitParameter parameter;
  parameter.shape = {5, 3};
  EXPECT_EQ(PaddedPieceNumel(parameter, 3), 6);
  EXPECT_THAT(ShardShape(parameter, 3, 2), ElementsAre(1, 3));
  parameter.shape = {};
  EXPECT_EQ(PaddedPieceNumel(parameter, 3), 1);
}

}  // namespace
}  // namespace shardplan::executor
