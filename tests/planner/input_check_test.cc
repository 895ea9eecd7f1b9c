// SPDX-License-Identifier: Apache-2.0
// Inputs that cannot be planned are refused where they are read, with their place; planning refuses them in
// the same words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/policy_knobs.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::HasSubstr;
using testing::LayeredTrace;

const ForwardCall kForward;
const BackwardCall kBackward;
const OptimizerStepCall kStep;
const ZeroGradCall kZero;

struct BadInput {
  std::string name;
  std::string pointer;
  std::string message;
};

void ExpectRefused(const Status& status, const BadInput& bad) {
  ASSERT_FALSE(status) << bad.name;
  EXPECT_EQ(status.error().code, ErrorCode::kBadInput) << bad.name;
  EXPECT_EQ(status.error().pointer, bad.pointer) << bad.name;
  EXPECT_THAT(status.error().message, HasSubstr(bad.message)) << bad.name;
}

// The first allocation of the first forward.
std::ptrdiff_t FirstBirth(const Trace& trace) {
  const std::vector<TraceEvent>& events = trace.forwards[0].events;
  return std::ranges::find_if(
             events, [](const TraceEvent& event) { return std::holds_alternative<AllocateEvent>(event); }) -
         events.begin();
}

// ---- strategies ----

struct BadStrategy {
  Strategy strategy;
  BadInput bad;
};

Strategy WithCall(const std::string& policy, ModuleCall call) {
  return {.policy = policy, .program = {{std::move(call), kForward, kBackward, kStep, kZero}}};
}

std::vector<BadStrategy> BadStrategies() {
  using enum OptimizerKind;
  return {
      {{.policy = ""}, {"policy", "/policy", "a policy has a name"}},
      {{.policy_knobs = {{"a", 1}}}, {"knobs", "/policy_knobs", "built in and has a block of its own"}},
      {{.policy = "own", .program = {{ModuleCall{.method = "unshard"}}}},
       {"call", "/program/0/0/method", "own does not know this call"}},
      {{.mesh = {{"shard", 0}}}, {"no rank", "/mesh/0/size", "needs a rank"}},
      {{.mesh = {{"shard", 1 << 20}, {"replicate", 1 << 20}}},
       {"overflow", "/mesh/1/size", "too many ranks"}},
      {{.mesh = {{"shard", 1}, {"shard", 2}}}, {"twice", "/mesh/1/name", "two dimensions"}},
      {{.policy = "fsdp1", .mesh = {{"tensor", 2}}}, {"name", "/mesh/0/name", "unknown mesh dimension"}},
      {{.policy = "fsdp1", .mesh = {{"shard", 2}, {"replicate", 1}}}, {"order", "/mesh", "outermost first"}},
      {{.mesh = {{"dp", 2}}, .data_parallel = DataParallelDims{.shard = {"shard"}}},
       {"dimension", "/data_parallel/shard/0", "no such dimension"}},
      {{.data_parallel = DataParallelDims{.shard = {"shard"}, .replicate = {"shard"}}},
       {"dimension twice", "/data_parallel/replicate/0", "named twice"}},
      {{.units = {{.modules = {}}}}, {"no module", "/units/0/modules", "a unit has a module"}},
      {{.policy = "fsdp1", .units = {{.modules = {"layers.0"}, .group = true}}},
       {"group", "/units/0/group", "wraps one module"}},
      {{.optimizer = {.kind = kAdam, .momentum = true}}, {"momentum", "/optimizer/momentum", "only sgd"}},
      {{.optimizer = {.kind = kSgd, .nesterov = true}},
       {"nesterov", "/optimizer/nesterov", "requires a momentum"}},
      {{.optimizer = {.kind = kSgd, .amsgrad = true}}, {"amsgrad", "/optimizer/amsgrad", "only adam"}},
      {{.optimizer = {.kind = kSgd, .capturable = true}},
       {"capturable", "/optimizer/capturable", "only adam"}},
      {{.optimizer = {.kind = kAdafactor, .implementation = OptimizerImplementation::kFused}},
       {"fused", "/optimizer/implementation", "no fused"}},
      {{.policy = "fsdp1", .optimizer = {.in_backward = true}},
       {"in backward", "/optimizer/in_backward", "use_orig_params"}},
      {{.setup = {{.method = "unshard"}}}, {"setup", "/setup/0/method", "its place in a step"}},
      {{.policy = "fsdp1", .setup = {{.method = "no_sync"}}},
       {"fsdp1 setup", "/setup/0/method", "its place in a step"}},
      {{.program = {{kBackward, kForward, kStep, kZero}}},
       {"backward first", "/program/0/0/microbatches/0", "has had no forward"}},
      {{.program = {{kForward, kBackward}, {kForward, BackwardCall{{0, 1}}}}},
       {"no forward", "/program/1/1/microbatches/1", "has had no forward"}},
      {{.program = {{kForward, BackwardCall{{0, 0}}}}}, {"twice", "/program/0/1/microbatches/1", "once"}},
      {{.program = {{kForward, BackwardCall{{}}}}}, {"none", "/program/0/1/microbatches", "at least one"}},
      {WithCall("fsdp2", {.method = "explode"}),
       {"call", "/program/0/0/method", "fsdp2 does not know this call"}},
      {WithCall("fsdp2", {.method = "no_sync"}),
       {"no_sync", "/program/0/0/method", "fsdp2 does not know this call"}},
      {WithCall("fsdp1", {.method = "unshard"}),
       {"unshard", "/program/0/0/method", "fsdp1 does not know this call"}},
      {WithCall("fsdp2", {.method = "set_gradient_divide_factor", .number = 2}),
       {"late", "/program/0/0/method", "before the first step"}},
      {WithCall("fsdp2", {.method = "set_reduce_scatter_max_input_buffers"}),
       {"number", "/program/0/0", "takes a number"}},
      {WithCall("fsdp2", {.method = "set_reduce_scatter_max_input_buffers", .number = 1.5}),
       {"half", "/program/0/0/number", "cannot be in flight"}},
      {WithCall("fsdp2", {.method = "reshard", .modules = {"layers.0"}}),
       {"modules", "/program/0/0/modules", "takes no modules"}},
      {WithCall("fsdp2", {.method = "reshard", .flags = {"writeback"}}),
       {"flag", "/program/0/0/flags/0", "does not know this flag"}},
      {WithCall("fsdp1", {.method = "summon_full_params", .flags = {"rank0_only"}}),
       {"rank0", "/program/0/0/flags", "rank0_only"}},
      {WithCall("fsdp1", {.method = "summon_full_params", .flags = {"with_grads"}}),
       {"grads", "/program/0/0/flags", "with_grads"}},
  };
}

TEST(InputCheckTest, StrategiesThatCannotBePlannedAreRefusedWhereTheyAreRead) {
  const Trace trace = LayeredTrace(2, 8, 8, 8);
  for (const BadStrategy& c : BadStrategies()) {
    ExpectRefused(CheckStrategy(c.strategy), c.bad);
    const Result<PlannerOutput> planned = MakePlan(trace, c.strategy, ClusterOf(2));
    ASSERT_FALSE(planned) << c.bad.name;
    EXPECT_EQ(planned.error(), CheckStrategy(c.strategy).error()) << c.bad.name;
    const Result<Strategy> read = ParseStrategy(ToJson(c.strategy));
    ASSERT_FALSE(read) << c.bad.name;  // a mesh dimension without ranks is refused by its field
    EXPECT_EQ(read.error().pointer, c.bad.pointer);
  }
}

// The allocator is the simulator's; so only who plans with its settings refuses them.
TEST(InputCheckTest, SettingsThatTheAllocatorRefusesAreNotPlannedWith) {
  const Trace trace = LayeredTrace(2, 8, 8, 8);
  for (const auto& [settings, message] : {std::pair{"expandable_segments", "expandable_segments"},
                                          {"expandable_segments:Maybe", "expandable_segments"},
                                          {"max_split_size_mb:1", "max_split_size_mb"}}) {
    const Result<PlannerOutput> planned = MakePlan(trace, {.alloc_conf = settings}, ClusterOf(2));
    ASSERT_FALSE(planned) << settings;
    EXPECT_EQ(planned.error().code, ErrorCode::kBadInput) << settings;
    EXPECT_EQ(planned.error().pointer, "/alloc_conf") << settings;
    EXPECT_THAT(ToString(planned.error()), HasSubstr(message));
  }
}

// The list of calls is in schemas, what they do in the planner.
TEST(InputCheckTest, EveryCallOfThePoliciesIsPlanned) {
  const Trace trace = LayeredTrace(2, 8, 8, 8);
  int planned_calls = 0;
  for (const PolicyKnobs& policy : AllPolicyKnobs()) {
    for (const CallForm& form : policy.calls) {
      ModuleCall call{.method = std::string(form.method), .value = true, .number = 2};
      if (form.argument == CallArgument::kModules) call.modules = {"layers.0"};
      Strategy strategy{.policy = policy.name, .units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
      if (form.in_setup) strategy.setup = {call};
      if (form.method == "finalize_backward") {
        strategy.setup = {{.method = "set_manual_backward_finalization", .value = true}};
      }
      if (form.in_program) {
        ModuleCall off = call;
        off.value = false;
        strategy.program = {{call, off, kForward, kBackward, kStep, kZero}};
        if (form.method == "finalize_backward") strategy.program = {{kForward, kBackward, off, kStep, kZero}};
      }
      const Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(2), {.verify = false});
      EXPECT_TRUE(planned) << policy.name << " " << form.method << ": " << ToString(planned.error());
      ++planned_calls;
    }
  }
  EXPECT_GT(planned_calls, 20);
}

// ---- traces ----

struct BadTrace {
  std::function<void(Trace&)> change;
  BadInput bad;
};

// The first event of type T in a pass, and its place.
template <typename T>
std::pair<T&, std::string> First(Pass& pass, const std::string& list) {
  for (std::size_t i = 0; i < pass.events.size(); ++i) {
    if (auto* event = std::get_if<T>(&pass.events[i])) return {*event, list + "/events/" + std::to_string(i)};
  }
  throw std::runtime_error("no such event");
}

// Changes the first event of a kind in the forward or the backward; `field` is what the error names.
template <typename T>
BadTrace Event(bool backward, std::string field, std::string message, std::function<void(T&)> change) {
  Trace trace = LayeredTrace(2, 8, 8, 8);
  const auto find = [backward](Trace& in) {
    return backward ? First<T>(in.backwards[0], "/backwards/0") : First<T>(in.forwards[0], "/forwards/0");
  };
  const std::string pointer = find(trace).second + field;
  return {[=](Trace& in) { change(find(in).first); }, {message, pointer, message}};
}

std::vector<BadTrace> BadTraces() {
  return {
      Event<ExitEvent>(false, "/1", "inside another", [](ExitEvent& e) { e.module = 0; }),
      Event<OperatorEvent>(false, "/8/0", "not born", [](OperatorEvent& e) { e.reads = {16'000'000}; }),
      Event<OperatorEvent>(false, "/9/0", "not born", [](OperatorEvent& e) { e.writes = {16'000'000}; }),
      Event<FreeEvent>(true, "/1", "not born", [](FreeEvent& e) { e.storage = 16'000'000; }),
      Event<OutputGradReadyEvent>(true, "/2", "so many tensors",
                                  [](OutputGradReadyEvent& e) { e.index = 9; }),
      Event<OutputGradReadyEvent>(true, "/3", "so often", [](OutputGradReadyEvent& e) { e.occurrence = 9; }),
      Event<OutputGradReadyEvent>(true, "/4", "forwards that this backward covers",
                                  [](OutputGradReadyEvent& e) { e.forward = 1; }),
      Event<InputsGradDoneEvent>(true, "/2", "so often", [](InputsGradDoneEvent& e) { e.occurrence = 9; }),
      Event<InputsGradDoneEvent>(true, "/3", "forwards that this backward covers",
                                 [](InputsGradDoneEvent& e) { e.forward = 7; }),
      {[](Trace& trace) { trace.modules[0].fqn = "x"; },
       {"root", "/modules/0/fqn", "first module is the root"}},
      {[](Trace& trace) { trace.modules[2].fqn = trace.modules[1].fqn; },
       {"name", "/modules/2/fqn", "same name"}},
      {[](Trace& trace) { trace.modules[0].children.push_back("x"); },
       {"child", "/modules/0/children/" + std::to_string(LayeredTrace(2, 8, 8, 8).modules[0].children.size()),
        "no entry"}},
      {[](Trace& trace) { trace.modules[0].children.erase(trace.modules[0].children.begin()); },
       {"orphan", "/modules/1/fqn", "has it as a child"}},
      {[](Trace& trace) { trace.modules[1].same_module_as = trace.modules[2].fqn; },
       {"same", "/modules/1/same_module_as", "first seen so"}},
      {[](Trace& trace) { trace.modules[0].compiled = "inductor"; },
       {"graph", "/forwards/0/events/1/1", "part of its graph"}},
      {[](Trace& trace) { trace.forwards[0].events.pop_back(); },
       {"open", "/forwards/0/events", "never left"}},
      {[](Trace& trace) {
         trace.forwards[0].events.insert(trace.forwards[0].events.begin(), ExitEvent{0, {}});
       },
       {"exit", "/forwards/0/events/0/1", "was not entered"}},
      {[](Trace& trace) {
         trace.forwards[0].events.insert(trace.forwards[0].events.begin(), BackwardEndEvent{});
       },
       {"kind", "/forwards/0/events/0/0", "of a backward"}},
      {[](Trace& trace) {
         trace.backwards[0].events.insert(trace.backwards[0].events.begin(), EnterEvent{0, {}});
       },
       {"kind", "/backwards/0/events/0/0", "of a forward"}},
      {[](Trace& trace) {
         trace.backwards[0].events.insert(trace.backwards[0].events.begin(), ReleaseEvent{0});
       },
       {"kind", "/backwards/0/events/0/0", "of a forward"}},
      {[](Trace& trace) {
         trace.forwards[0].events.insert(trace.forwards[0].events.begin(), ReleaseEvent{1'000'000});
       },
       {"release", "/forwards/0/events/0/1", "not born before"}},
      {[](Trace& trace) {
         std::vector<TraceEvent>& events = trace.forwards[0].events;
         const auto born = events.begin() + FirstBirth(trace);
         const ReleaseEvent release{std::get<AllocateEvent>(*born).storage};
         events.insert(std::next(born), {release, release});
       },
       {"release", "/forwards/0/events/" + std::to_string(FirstBirth(LayeredTrace(2, 8, 8, 8)) + 2) + "/1",
        "released once"}},
      {[](Trace& trace) {
         trace.backwards[0].events.insert(trace.backwards[0].events.begin(), RecomputeExitEvent{0});
       },
       {"recompute", "/backwards/0/events/0/1", "did not begin"}},
      {[](Trace& trace) { trace.backwards[0].forwards = {3}; },
       {"forward", "/backwards/0/forwards/0", "no such"}},
      {[](Trace& trace) { trace.calls = {TracedForward{0}}; },
       {"calls leave a pass out", "/calls", "passes that are never called"}},
      {[](Trace& trace) {
         trace.calls = {TracedForward{0}, TracedForward{0}, TracedBackward{0}};
       },
       {"calls repeat a pass", "/calls/1/1", "called once, in the order of their list"}},
      {[](Trace& trace) {
         trace.calls = {TracedBackward{0}, TracedForward{0}};
       },
       {"calls in no order", "/calls/0", "covers a forward that no call before it runs"}},
      {[](Trace& trace) { trace.backwards[0].forwards.clear(); },
       {"none", "/backwards/0/forwards", "covers a"}},
  };
}

TEST(InputCheckTest, AlteredTracesAreRefusedWhereTheyAreRead) {
  for (const BadTrace& c : BadTraces()) {
    Trace trace = LayeredTrace(2, 8, 8, 8);
    ASSERT_TRUE(CheckTrace(trace));
    c.change(trace);
    ExpectRefused(CheckTrace(trace), c.bad);
    const Result<PlannerOutput> planned = MakePlan(trace, Strategy{}, ClusterOf(2));
    ASSERT_FALSE(planned) << c.bad.name;
    EXPECT_EQ(planned.error(), CheckTrace(trace).error()) << c.bad.name;
    EXPECT_FALSE(ParseTrace(ToJson(trace))) << c.bad.name;
  }
}

// The second of two backwards does not find what the first has freed.
TEST(InputCheckTest, CallsFindWhatThoseBeforeThemLeft) {
  Trace trace = LayeredTrace(2, 8, 8, 8);
  Pass again = trace.backwards[0];
  trace.backwards.push_back(again);
  ASSERT_TRUE(CheckTrace(trace));  // one or the other
  trace.calls = {TracedForward{0}, TracedBackward{0}, TracedBackward{1}};
  const Status status = CheckTrace(trace);
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message, HasSubstr("not alive here"));
  EXPECT_THAT(status.error().pointer, HasSubstr("/backwards/1/events/"));
}

// The calls that are usual anyway.
TEST(InputCheckTest, CallsOfATraceAreTheProgramOfAStrategyWithoutOne) {
  Trace trace = LayeredTrace(2, 8, 8, 8);
  const Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  const Result<PlannerOutput> usual = MakePlan(trace, strategy, ClusterOf(2));
  trace.calls = {TracedForward{0}, TracedBackward{0}};
  const Result<PlannerOutput> called = MakePlan(trace, strategy, ClusterOf(2));
  ASSERT_TRUE(usual && called);
  EXPECT_TRUE(called->plan.steps == usual->plan.steps);
  EXPECT_EQ(called->plan.strategy.program, (std::vector<StepProgram>{{kForward, kBackward, kStep, kZero}}));
  Strategy own = strategy;
  own.program = {{kForward, kBackward, kStep}};
  const Result<PlannerOutput> given = MakePlan(trace, own, ClusterOf(2));
  ASSERT_TRUE(given);
  EXPECT_EQ(given->plan.strategy.program, own.program);
}

// Events that come twice: nothing of a trace happens twice.
TEST(InputCheckTest, EventsThatComeTwiceAreRefused) {
  const Trace good = LayeredTrace(2, 8, 8, 8);
  int refused = 0;
  for (const bool backward : {false, true}) {
    const Pass& pass = backward ? good.backwards[0] : good.forwards[0];
    for (std::size_t i = 0; i < pass.events.size(); ++i) {
      if (std::holds_alternative<OperatorEvent>(pass.events[i])) continue;
      Trace trace = good;
      std::vector<TraceEvent>& events = (backward ? trace.backwards : trace.forwards)[0].events;
      events.insert(events.begin() + static_cast<std::ptrdiff_t>(i), pass.events[i]);
      EXPECT_FALSE(CheckTrace(trace)) << (backward ? "backward " : "forward ") << i;
      ++refused;
    }
  }
  EXPECT_GE(refused, 30);
}

// An operator that reads a parameter of another module's unit: PyTorch reads a shard there.
TEST(InputCheckTest, AReadOutsideOfTheUnitIsNamed) {
  Trace trace = LayeredTrace(2, 8, 8, 8);
  std::string pointer;
  for (std::size_t i = 0; i < trace.forwards[0].events.size(); ++i) {
    auto* op = std::get_if<OperatorEvent>(&trace.forwards[0].events[i]);
    if (op == nullptr || trace.modules[static_cast<std::size_t>(op->module)].fqn != "layers.0") continue;
    const auto& parameters = trace.modules;
    for (const Module& module : parameters) {
      if (module.fqn == "layers.1") op->parameters = {module.parameters.front().parameter};
    }
    pointer = "/forwards/0/events/" + std::to_string(i);
    break;
  }
  const Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(2));
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(planned.error().pointer, pointer) << ToString(planned.error());
  EXPECT_THAT(planned.error().message, HasSubstr("layers.1"));
}

}  // namespace
}  // namespace shardplan
