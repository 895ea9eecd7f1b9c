// SPDX-License-Identifier: Apache-2.0
// Every setter of FSDPModule that a program may call, called at the end of the step that repeats: the step
// that is found steady is the one in which the setting holds from its begin.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "tests/planner/synthetic.h"

namespace shardplan {

void PrintTo(const ModuleCall& call, std::ostream* out) { *out << call.method; }

namespace {

using testing::ClusterOf;
using ::testing::HasSubstr;
using testing::LayeredTrace;

// Two replicas of two shards.
Strategy Base() {
  return {.mesh = {{"replicate", 2}, {"shard", 2}}, .units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
}

StepProgram PlainStep() { return {ForwardCall{}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}}; }

std::string BufferText(const Plan& plan, BufferId id) {
  if (id < 0) return "-";
  const Buffer& buffer = plan.buffers[id];
  return fmt::format("{} of {} [{}] {} pool {}", Name(buffer.role), buffer.unit, SizeBytes(buffer).value,
                     fmt::join(buffer.parameters, ","), buffer.pool);
}

// The instructions of the steady step, apart from the setter's own trigger, without the ids that depend on
// what other steps use.
std::vector<std::string> SteadyStep(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    if (trigger.kind == TriggerKind::kUserCall) continue;
    lines.push_back(fmt::format("{} {}", Name(trigger.kind), trigger.unit));
    for (const Instruction& i : trigger.instructions) {
      lines.push_back(
          fmt::format("  {} {} -> {} on {} event {} communicator {} op {} divisor {} parts [{}] unit {} {}",
                      Name(i.kind), BufferText(plan, i.src), BufferText(plan, i.dst),
                      i.stream < 0 ? "host" : plan.streams[i.stream].name,
                      i.event < 0 ? "-" : plan.events[i.event], i.communicator, static_cast<int>(i.reduce_op),
                      i.divisor, fmt::join(i.parts, ","), i.unit, i.reason.str()));
    }
  }
  return lines;
}

std::vector<std::string> SteadyStepOf(std::vector<StepProgram> program,
                                      PyTorchVersion pytorch = kNewestPyTorch) {
  Strategy strategy = Base();
  strategy.pytorch = pytorch;
  strategy.program = std::move(program);
  // Some settings make PyTorch, and so the plan, do wrong things for ever.
  const Result<PlannerOutput> planned =
      MakePlan(LayeredTrace(3, 8, 8, 16), strategy, ClusterOf(4), {.verify = false});
  if (!planned) ADD_FAILURE() << ToString(planned.error());
  return planned ? SteadyStep(planned->plan) : std::vector<std::string>{};
}

const std::vector<ModuleCall>& Setters() {
  static const std::vector<ModuleCall> setters = {
      {.method = "set_requires_gradient_sync", .value = false},
      {.method = "set_requires_all_reduce", .value = false},
      {.method = "set_is_last_backward", .value = false},
      {.method = "set_reshard_after_forward", .value = false},
      {.method = "set_reshard_after_forward", .value = true},
      {.method = "set_reshard_after_backward", .value = false},
      {.method = "set_modules_to_forward_prefetch", .modules = {"layers.0"}},
      {.method = "set_modules_to_backward_prefetch", .module = "layers.2", .modules = {"layers.0"}},
      {.method = "set_post_optim_event"},
      {.method = "set_force_sum_reduction_for_comms", .module = "layers.1"},
      {.method = "set_unshard_in_backward", .module = "layers.1", .value = false},
      {.method = "set_allocate_memory_from_process_group_for_comm", .module = "layers.1"},
      {.method = "_set_unshard_async_op"},
      {.method = "set_separate_reduce_scatter_group"},
  };
  return setters;
}

class Fsdp2SettersTest : public ::testing::TestWithParam<ModuleCall> {};

TEST_P(Fsdp2SettersTest, SetLateInAStepHoldsInTheSteadyStep) {
  StepProgram late = PlainStep();
  late.push_back(GetParam());
  StepProgram early = PlainStep();
  early.insert(early.begin(), GetParam());
  const std::vector<std::string> steady = SteadyStepOf({PlainStep(), late});
  EXPECT_EQ(steady, SteadyStepOf({early}));
  EXPECT_NE(steady, SteadyStepOf({PlainStep()})) << "the setter has no effect here: the case shows nothing";
}

// 2.15 reads it once, in the first forward.
TEST(ReduceScatterCap, IsTakenInTheFirstForward) {
  const ModuleCall setter{.method = "set_reduce_scatter_max_input_buffers", .number = 2.0};
  StepProgram late = PlainStep();
  late.push_back(setter);
  StepProgram early = PlainStep();
  early.insert(early.begin(), setter);
  const auto steady = [](std::vector<StepProgram> program, PyTorchVersion pytorch) {
    return SteadyStepOf(std::move(program), pytorch);
  };
  for (const PyTorchVersion pytorch : {PyTorchVersion::k2_11, PyTorchVersion::k2_15}) {
    EXPECT_NE(steady({early}, pytorch), steady({PlainStep()}, pytorch));
  }
  EXPECT_EQ(steady({PlainStep(), late}, PyTorchVersion::k2_11), steady({early}, PyTorchVersion::k2_11));
  EXPECT_EQ(steady({PlainStep(), late}, PyTorchVersion::k2_15), steady({PlainStep()}, PyTorchVersion::k2_15));
}

INSTANTIATE_TEST_SUITE_P(All, Fsdp2SettersTest, ::testing::ValuesIn(Setters()), [](const auto& info) {
  return fmt::format("{}_{}", info.index, info.param.method);
});

TEST(Fsdp2SettersTest, TheDivideFactorIsSetBeforeTheFirstStepOnly) {
  Strategy strategy = Base();
  StepProgram step = PlainStep();
  step.push_back(ModuleCall{.method = "set_gradient_divide_factor", .number = 3.0});
  strategy.program = {step};
  const Result<PlannerOutput> planned = MakePlan(LayeredTrace(3, 8, 8, 16), strategy, ClusterOf(4));
  ASSERT_FALSE(planned);
  EXPECT_THAT(planned.error().message, HasSubstr("has its place before the first step"));
}

// A forward without a backward leaves the parameters on the smaller mesh.
TEST(Fsdp2SettersTest, TheReshardIsNotTurnedOffWhileParametersAreOnTheSmallerMesh) {
  for (const std::optional<DType> param_dtype : {std::optional<DType>{}, std::optional(DType::kBFloat16)}) {
    Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}},
                      .mixed_precision = MixedPrecision{.param_dtype = param_dtype},
                      .reshard_after_forward = ReshardAfterForward(std::int64_t{2})};
    strategy.program = {{ForwardCall{}, ModuleCall{.method = "set_reshard_after_forward", .value = false},
                         ForwardCall{.microbatch = 1}, BackwardCall{.microbatches = {1}}}};
    const Result<PlannerOutput> planned = MakePlan(LayeredTrace(3, 8, 8, 16), strategy, ClusterOf(4));
    ASSERT_FALSE(planned);
    EXPECT_THAT(planned.error().message, HasSubstr("PyTorch fails here (Expected mesh_info"));
  }
}

// The forward of the steady step has it set, the backward not.
TEST(Fsdp2SettersTest, AFlagSetAndClearedInAStepIsNotMissed) {
  const ModuleCall on{.method = "_set_unshard_async_op", .value = true};
  const ModuleCall off{.method = "_set_unshard_async_op", .value = false};
  StepProgram step = PlainStep();
  step.insert(step.begin() + 1, off);
  step.push_back(on);
  StepProgram expected = PlainStep();
  expected.insert(expected.begin() + 1, off);
  expected.insert(expected.begin(), on);
  const std::vector<std::string> steady = SteadyStepOf({PlainStep(), step});
  EXPECT_EQ(steady, SteadyStepOf({expected}));
  EXPECT_NE(steady, SteadyStepOf({PlainStep()}));
}

}  // namespace
}  // namespace shardplan
