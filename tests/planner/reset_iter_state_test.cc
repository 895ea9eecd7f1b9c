// SPDX-License-Identifier: Apache-2.0
// A pass that raised, wherever it did, and FSDPModule.reset_iter_state behind it: the plan verifies, and what
// follows is what follows without.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::HasSubstr;
using testing::LayeredTrace;

const ModuleCall kReset{.method = "reset_iter_state"};

ModuleCall Set(std::string method, bool value) { return {.method = std::move(method), .value = value}; }

void Append(StepProgram& program, const StepProgram& calls) {
  program.insert(program.end(), calls.begin(), calls.end());
}

// With a second forward, or backward, that has the first `events` of its events.
Trace Abandoning(const Trace& trace, bool backward, std::size_t events) {
  Trace result = trace;
  std::vector<Pass>& passes = backward ? result.backwards : result.forwards;
  Pass pass = passes.front();
  pass.events.resize(events);
  pass.abandoned = true;
  passes.push_back(std::move(pass));
  return result;
}

struct Kind {
  std::string name;
  Strategy strategy;
  StepProgram before;  // what the step does before the pass that raises
  StepProgram after;   // and behind the reset
};

std::vector<Kind> Kinds() {
  const StepProgram micro = {ForwardCall{}, BackwardCall{}};
  const std::vector<UnitRule> units = {{.modules = {"layers.*"}}, {.modules = {""}}};
  std::vector<Kind> kinds = {{"default", {.units = units}, {}, micro}};
  kinds.push_back({"kept", {.units = units, .reshard_after_forward = ReshardAfterForward(false)}, {}, micro});
  kinds.push_back({"part", {.units = units, .reshard_after_forward = ReshardAfterForward(2)}, {}, micro});
  kinds.push_back({"offload", {.units = units, .cpu_offload = true}, {}, micro});
  kinds.push_back(
      {"lists", {.units = units, .fsdp2 = {.forward_prefetch = 1, .backward_prefetch = 2}}, {}, micro});
  StepProgram unsynced = {Set("set_requires_gradient_sync", false)};
  Append(unsynced, micro);
  StepProgram synced = unsynced;
  synced.emplace_back(Set("set_requires_gradient_sync", true));
  Append(synced, micro);
  kinds.push_back({"accumulates", {.units = units}, unsynced, synced});
  kinds.push_back(
      {"accumulates_in_float32",
       {.units = units,
        .mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32}},
       unsynced,
       synced});
  kinds.push_back({"reduced_before", {.units = units}, micro, micro});
  StepProgram partial = {Set("set_requires_all_reduce", false)}, whole;
  Append(partial, micro);
  whole = partial;
  whole.emplace_back(Set("set_requires_all_reduce", true));
  Append(whole, micro);
  kinds.push_back(
      {"partial_sums", {.mesh = {{"replicate", 2}, {"shard", 2}}, .units = units}, partial, whole});
  return kinds;
}

Result<Plan> PlanOf(const Trace& trace, Strategy strategy, std::vector<StepProgram> program) {
  for (StepProgram& step : program) Append(step, {OptimizerStepCall{}, ZeroGradCall{}});
  strategy.program = std::move(program);
  Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(4));
  if (!planned) return std::unexpected(planned.error());
  return std::move(planned->plan);
}

// The instructions of the step that repeats, by the names of what they are issued on.
std::vector<std::string> Steady(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    lines.push_back(fmt::format("{} {}", Name(trigger.kind), trigger.unit));
    for (const Instruction& i : trigger.instructions) {
      const auto buffer = [&](BufferId id) { return id < 0 ? std::string("-") : plan.buffers[id].name; };
      lines.push_back(fmt::format("{} {} {} {} {}", Name(i.kind), buffer(i.src), buffer(i.dst), i.stream,
                                  i.event < 0 ? "-" : plan.events[i.event]));
    }
  }
  return lines;
}

TEST(ResetIterStateTest, WhereverAPassRaisesThePlanVerifiesAndTheNextStepIsAsBefore) {
  const Trace trace = LayeredTrace(3, 8, 8, 16);
  int plans = 0;
  for (const Kind& kind : Kinds()) {
    const Result<Plan> plain = PlanOf(trace, kind.strategy, {kind.after});
    ASSERT_TRUE(plain) << kind.name << ": " << ToString(plain.error());
    for (const bool backward : {false, true}) {
      const std::size_t length = (backward ? trace.backwards : trace.forwards)[0].events.size();
      for (std::size_t events = 1; events < length; ++events) {
        SCOPED_TRACE(
            fmt::format("{}: {} events of the {}", kind.name, events, backward ? "backward" : "forward"));
        StepProgram step = kind.before;
        if (backward) {
          Append(step, {ForwardCall{}, BackwardCall{.trace = 1}});
        } else {
          step.emplace_back(ForwardCall{.trace = 1});
        }
        step.emplace_back(kReset);
        Append(step, kind.after);
        const Result<Plan> plan =
            PlanOf(Abandoning(trace, backward, events), kind.strategy, {kind.after, step, kind.after});
        ASSERT_TRUE(plan) << ToString(plan.error());
        EXPECT_EQ(Steady(*plan), Steady(*plain));
        ++plans;
      }
    }
  }
  EXPECT_GT(plans, 300);
}

TEST(ResetIterStateTest, APassThatRaisedIsFollowedByIt) {
  const Trace trace = Abandoning(LayeredTrace(2, 8, 8), false, 3);
  const Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  const Result<Plan> plan =
      PlanOf(trace, strategy, {{ForwardCall{.trace = 1}, ForwardCall{}, BackwardCall{}}});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(plan.error().pointer, "/forwards/1/abandoned");
  EXPECT_THAT(plan.error().message, HasSubstr("call 1 of step 0"));
  EXPECT_THAT(plan.error().expected, HasSubstr("reset_iter_state"));
}

TEST(ResetIterStateTest, IsOfTheRoot) {
  const Trace trace = LayeredTrace(2, 8, 8, 16);
  const Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  const ModuleCall of_layer{.method = "reset_iter_state", .module = "layers.0"};
  const Result<Plan> plan = PlanOf(trace, strategy, {{ForwardCall{}, BackwardCall{}, of_layer}});
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("PyTorch fails here (RuntimeError)"));
}

}  // namespace
}  // namespace shardplan
