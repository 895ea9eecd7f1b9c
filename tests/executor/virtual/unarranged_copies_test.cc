// SPDX-License-Identifier: Apache-2.0
// Copies of buffers whose role has no arrangement. The verifier takes an optimizer state for memory without a
// layout, part by part; so does the executor, whatever the parts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "executor/src/replay/program.h"
#include "shardplan/schemas/buffer_roles.h"
#include "tests/support/plan_builder.h"

namespace shardplan::executor {
namespace {

using test::PlanBuilder;

// A step that copies a state of one unit with two parameters to the host.
Plan CopiesStates(std::vector<Bytes> parts, std::vector<Bytes> parts_on_host) {
  PlanBuilder b;
  const UnitId unit = b.Unit("layer", 2);
  const BufferId on_device = b.Buffer(BufferRole::kOptimizerState, unit);
  const BufferId on_host = b.Buffer(BufferRole::kOptimizerState, unit);
  b.Step("steady").At(TriggerKind::kStepBegin).Move(InstructionKind::kCopyToHost, on_device, on_host, 0);
  Plan plan = b.plan();
  plan.buffers[on_device].parts_bytes = std::move(parts);
  plan.buffers[on_host].parts_bytes = std::move(parts_on_host);
  plan.buffers[on_host].name = "layer.state_on_host";
  plan.buffers[on_host].memory = MemoryKind::kPinnedHost;
  return plan;
}

TEST(UnarrangedCopies, StatesHaveNoArrangement) {
  EXPECT_EQ(ArrangementOf(BufferRole::kOptimizerState), Arrangement::kNone);
  EXPECT_EQ(ArrangementOf(BufferRole::kOptimizerTemp), Arrangement::kNone);
}

// AdamW's: a step count and two moments of each parameter. A state is no shard of them.
TEST(UnarrangedCopies, AStateMovesPartByPart) {
  const std::vector<Bytes> parts = {{4}, {16}, {16}, {4}, {16}, {16}};
  const Plan plan = CopiesStates(parts, parts);
  const Result<Program> program = BuildProgram(plan, 0, {});
  ASSERT_TRUE(program) << ToString(program.error());
  ASSERT_EQ(program->copies.size(), 1U);
  const CopySpec& copy = program->copies.front();
  ASSERT_EQ(copy.runs.size(), parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) {
    EXPECT_EQ(copy.runs[p].src_part, static_cast<std::int32_t>(p));
    EXPECT_EQ(copy.runs[p].dst_part, static_cast<std::int32_t>(p));
    EXPECT_EQ(copy.runs[p].row_numel * 4, parts[p].value);
  }
}

TEST(UnarrangedCopies, OtherPartsAreRefused) {
  const Plan plan = CopiesStates({{4}, {16}}, {{20}});
  const Result<Program> program = BuildProgram(plan, 0, {});
  ASSERT_FALSE(program);
  EXPECT_EQ(program.error().found, "1 parts");
  EXPECT_EQ(program.error().expected, "2 parts");
  EXPECT_NE(program.error().message.find("part by part"), std::string::npos) << program.error().message;
}

}  // namespace
}  // namespace shardplan::executor
