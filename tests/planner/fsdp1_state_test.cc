// SPDX-License-Identifier: Apache-2.0
// fsdp1: what a program does late decides every later step. A plan ends in steps that repeat for ever; these
// have to be those that the policy would go on to plan.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "tests/planner/planned.h"
#include "tests/planner/random_cases.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using testing::LayeredTrace;

// Indices into the trace's passes.
constexpr std::int32_t kWithGradients = 0, kWithoutGradients = 1;  // forwards
constexpr std::int32_t kWhole = 0, kNotTheFirstLayer = 1;          // backwards of kWithGradients

Trace TraceWithBranches() {
  Trace trace = LayeredTrace(2, 8, 8, 8);
  trace.forwards.push_back(trace.forwards[0]);
  trace.forwards[kWithoutGradients].grad_enabled = false;
  for (Tensor& tensor : trace.forwards[kWithoutGradients].tensors) tensor.requires_grad = false;
  trace.backwards.push_back(trace.backwards[0]);
  std::vector<TraceEvent>& events = trace.backwards[kNotTheFirstLayer].events;
  const auto module = std::ranges::find(trace.modules, "layers.0", &Module::fqn) - trace.modules.begin();
  events.erase(std::ranges::find_if(events,
                                    [&](const TraceEvent& event) {
                                      const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
                                      return ready != nullptr && ready->module == module;
                                    }),
               events.end());
  return trace;
}

ForwardCall Forward(std::int32_t microbatch = 0, std::int32_t trace = kWithGradients,
                    std::optional<bool> training = std::nullopt) {
  return {microbatch, trace, training};
}
BackwardCall Backward(std::vector<std::int32_t> microbatches = {0}, std::int32_t trace = kWhole) {
  return {std::move(microbatches), trace};
}
ModuleCall Call(std::string method, bool value, std::vector<std::string> flags = {}, std::string module = "",
                bool recurse = true) {
  ModuleCall call{.method = std::move(method), .module = std::move(module), .value = value};
  call.recurse = recurse;
  call.flags = std::move(flags);
  return call;
}
ModuleCall Enter(std::vector<std::string> flags = {}, std::string module = "", bool recurse = true) {
  return Call("summon_full_params", true, std::move(flags), std::move(module), recurse);
}
ModuleCall Leave(std::string module = "", bool recurse = true) {
  return Call("summon_full_params", false, {}, std::move(module), recurse);
}
const OptimizerStepCall kStateStep;
const ZeroGradCall kStateZero;
const StepProgram kUsual = {Forward(), Backward(), kStateStep, kStateZero};

StepProgram Joined(StepProgram first, const StepProgram& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

struct NamedProgram {
  std::string name;
  std::vector<StepProgram> steps;
};

const std::vector<std::vector<std::string>> kSummonFlags = {
    {}, {"with_grads"}, {"offload_to_cpu"}, {"writeback"}, {"rank0_only", "writeback"}};

// Calls that a program makes to FSDP1, each made late, and once for all that comes after.
std::vector<NamedProgram> LatePrograms() {
  std::vector<NamedProgram> programs;
  const auto add = [&](std::string name, std::vector<StepProgram> steps) {
    steps.insert(steps.begin(), kUsual);
    programs.push_back({std::move(name), std::move(steps)});
  };
  for (const bool value : {true, false}) {
    for (const char* method : {"no_sync", "set_requires_gradient_sync"}) {
      const ModuleCall call = Call(method, value), back = Call(method, !value);
      const std::string name = fmt::format("{}({})", method, value);
      add(name + " for ever", {Joined({call}, kUsual), kUsual});
      add(name + " at the end of a step", {Joined(kUsual, {call}), kUsual});
      add(name + " for a step", {Joined({call}, kUsual), Joined({back}, kUsual), kUsual});
      add(name + " for a micro-batch",
          {{call, Forward(), Backward(), back, Forward(1), Backward({1}), kStateStep, kStateZero}});
      add(name + " for a forward", {{call, Forward(), back, Backward(), kStateStep, kStateZero}});
    }
  }
  for (const std::vector<std::string>& flags : kSummonFlags) {
    const std::string name = fmt::format("summon_full_params({})", fmt::join(flags, ", "));
    add(name + " in every later step", {Joined({Enter(flags), Leave()}, kUsual)});
    add(name + " once", {Joined({Enter(flags), Leave()}, kUsual), kUsual});
    add(name + " with gradients there",
        {{Forward(), Backward(), kStateStep, Enter(flags), Leave(), kStateZero}});
    add(name + " behind an evaluation", {{Forward(0, kWithoutGradients), Enter(flags), Leave()}, kUsual});
    add(name + " of a unit", {kUsual, {Enter(flags, "layers.1", false), Leave("layers.1", false)}, kUsual});
    add(name + " over a step's end", {{Forward(), Backward(), kStateStep, Enter(flags)},
                                      {Leave(), kStateZero, Forward(), Backward(), kStateStep, Enter()}});
    add(name + " over a step's end, then usual",
        {{Forward(), Backward(), kStateStep, Enter(flags)}, Joined({Leave(), kStateZero}, kUsual), kUsual});
    add(name + " over a step's end, behind an evaluation",
        {{Forward(), Backward(), kStateStep, kStateZero, Forward(0, kWithoutGradients), Enter(flags)},
         {Leave(), Forward(), Backward(), kStateStep, kStateZero, Enter()}});
  }
  add("evaluation", {{Forward(0, kWithoutGradients)}, kUsual});
  add("evaluation in every later step", {Joined(kUsual, {Forward(0, kWithoutGradients)})});
  add("evaluation for ever", {{Forward(0, kWithoutGradients)}});
  add("no gradients in training mode", {{Forward(0, kWithoutGradients, true)}, kUsual});
  add("training in evaluation mode",
      {{Forward(0, kWithGradients, false), Backward(), kStateStep, kStateZero}, kUsual});
  add("training in evaluation mode for ever",
      {{Forward(0, kWithGradients, false), Backward(), kStateStep, kStateZero}});
  add("evaluation before the gradients are zeroed",
      {{Forward(), Backward(), kStateStep, Forward(0, kWithoutGradients), kStateZero}});
  add("evaluation under no_sync before the gradients are zeroed",
      {{Call("no_sync", true), Forward(), Backward(), Call("no_sync", false), kStateZero,
        Forward(0, kWithoutGradients)}});
  add("forward without a backward", {{Forward(1)}, kUsual});
  add("forwards of other micro-batches",
      {{Forward(1), Forward(0), Backward({1}), Backward({0}), kStateStep, kStateZero}});
  add("another micro-batch", {{Forward(3), Backward({3}), kStateStep, kStateZero}});
  add("a backward of two forwards",
      {{Forward(0), Forward(1), Backward({0}), Backward({1}), kStateStep, kStateZero}, kUsual});
  add("a backward that does not reach all",
      {{Forward(), Backward({0}, kNotTheFirstLayer), kStateStep, kStateZero}, kUsual});
  add("two backwards of a forward", {{Forward(), Backward(), Backward(), kStateStep, kStateZero}, kUsual});
  add("gradients that stay", {{Forward(), Backward(), kStateStep}, kUsual});
  add("gradients that stay for ever", {{Forward(), Backward(), kStateStep}});
  add("no optimizer step", {{Forward(), Backward(), kStateZero}, kUsual});
  add("gradients zeroed twice",
      {{kStateZero, Forward(), kStateZero, Backward(), kStateStep, kStateZero}, kUsual});
  add("a step that does nothing", {{}, kUsual});
  add("a backward in the step after its forward",
      {{Forward(0, kWithGradients, false)},
       {Backward(), kStateStep, kStateZero, Forward(0, kWithGradients, true)}});
  programs.push_back({"summon_full_params alone", {{Enter(), Leave()}}});
  programs.push_back({"a first forward late", {{kStateZero}, {kStateZero, kStateZero}, kUsual}});
  return programs;
}

struct NamedStrategy {
  std::string name;
  Strategy strategy;
};

std::vector<NamedStrategy> Strategies() {
  std::vector<NamedStrategy> strategies;
  const auto add = [&](std::string name, const std::function<void(Strategy&)>& set) {
    Strategy strategy;
    strategy.policy = "fsdp1";
    set(strategy);
    strategies.push_back({std::move(name), std::move(strategy)});
  };
  const MixedPrecision bf16{.param_dtype = DType::kBFloat16};
  add("default", [](Strategy&) {});
  add("use_orig_params", [](Strategy& s) { s.fsdp1.use_orig_params = true; });
  add("use_orig_params without a rate limit", [](Strategy& s) {
    s.fsdp1.use_orig_params = true;
    s.fsdp1.limit_all_gathers = false;
  });
  add("shard_grad_op", [](Strategy& s) {
    s.fsdp1.sharding = Fsdp1Sharding::kShardGradOp;
    s.fsdp1.use_orig_params = true;
  });
  add("no_shard", [](Strategy& s) { s.fsdp1.sharding = Fsdp1Sharding::kNoShard; });
  add("hybrid_shard", [](Strategy& s) {
    s.mesh = {{"replicate", 2}, {"shard", 2}};
    s.fsdp1.sharding = Fsdp1Sharding::kHybridShard;
  });
  for (const Fsdp1Sharding sharding :
       {Fsdp1Sharding::kFullShard, Fsdp1Sharding::kShardGradOp, Fsdp1Sharding::kNoShard}) {
    add(fmt::format("full_precision_in_eval, sharding {}", static_cast<int>(sharding)), [&](Strategy& s) {
      s.mixed_precision = bf16;
      s.fsdp1.full_precision_in_eval = true;
      s.fsdp1.sharding = sharding;
    });
  }
  add("keep_low_precision_grads", [&](Strategy& s) {
    s.mixed_precision = bf16;
    s.mixed_precision->keep_low_precision_grads = true;
    s.fsdp1.use_orig_params = true;
  });
  add("cpu_offload", [](Strategy& s) { s.cpu_offload = true; });
  add("cpu_offload, optimizer in backward", [](Strategy& s) {
    s.cpu_offload = true;
    s.fsdp1.use_orig_params = true;
    s.optimizer.in_backward = true;
  });
  add("prefetches", [](Strategy& s) {
    s.fsdp1.forward_prefetch = true;
    s.fsdp1.backward_prefetch = Fsdp1BackwardPrefetch::kPost;
    s.fsdp1.limit_all_gathers = false;
  });
  add("forward_prefetch", [](Strategy& s) { s.fsdp1.forward_prefetch = true; });
  return strategies;
}

std::string BufferName(const Plan& plan, BufferId id) { return id < 0 ? "-" : plan.buffers[id].name; }
std::string EventName(const Plan& plan, EventId id) { return id < 0 ? "-" : plan.events[id]; }

// A step as text, in names: ids of two plans differ.
std::vector<std::string> Lines(const Plan& plan, const PlanStep& step) {
  std::vector<std::string> lines;
  for (const Trigger& trigger : step.triggers) {
    // Outside of forwards and backwards the micro-batch is that of the one before, maybe in the step before.
    if (trigger.unit < 0 || trigger.kind == TriggerKind::kUserCall) {
      lines.push_back(fmt::format("{} unit {}", Name(trigger.kind), trigger.unit));
    } else {
      lines.push_back(fmt::format("{} unit {} micro-batch {} occurrence {}", Name(trigger.kind), trigger.unit,
                                  trigger.microbatch, trigger.occurrence));
    }
    for (const Instruction& i : trigger.instructions) {
      lines.push_back(fmt::format(
          "  {} {} -> {} on {} event {} unit {} segment {} communicator {} divisor {} safe after {} because "
          "{}",
          Name(i.kind), BufferName(plan, i.src), BufferName(plan, i.dst), i.stream, EventName(plan, i.event),
          i.unit, i.segment, i.communicator, i.divisor, fmt::join(i.safe_after, ","), i.reason.str()));
    }
  }
  return lines;
}

// An event of the rate limiter is called "again" where one of its unit is still in the queue: which of the
// two is the older one depends on when the cycle began.
std::string WithoutAgain(std::string line) {
  for (std::size_t at = line.find(".free.again"); at != std::string::npos; at = line.find(".free.again")) {
    line.erase(at + 5, 6);
  }
  return line;
}

// The first line that differs; empty: none.
std::string Difference(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  const auto [first, second] = std::ranges::mismatch(a, b);
  if (first == a.end() && second == b.end()) return {};
  return fmt::format("line {}\n  {}\n  {}", first - a.begin(), first == a.end() ? "(nothing)" : *first,
                     second == b.end() ? "(nothing)" : *second);
}

// The step that is run as the n-th.
const PlanStep& StepAt(const Plan& plan, std::size_t n) {
  const std::size_t count = plan.steps.size(), first = static_cast<std::size_t>(plan.steady_step);
  return plan.steps[n < count ? n : first + (n - first) % (count - first)];
}

// Not verified: some of the programs are wrong in PyTorch, too.
Result<PlannerOutput> PlanOf(const Trace& trace, const Strategy& strategy) {
  return MakePlan(trace, strategy, ClusterOf(strategy.mesh.empty() ? 2 : 4), {.verify = false});
}

// Whether FSDP1 takes the program. Then the plan's steps are those of a program that spells out more
// repetitions of the last step and goes on with another one: only behind that the policy looks for states
// that come back.
bool StepsRepeatAsThePolicyGoesOn(const Trace& trace, Strategy strategy) {
  constexpr std::size_t kMore = 3;
  const StepProgram other = {kStateZero, kStateZero, kStateZero};
  const Result<PlannerOutput> plan = PlanOf(trace, strategy);
  const std::size_t compared = strategy.program.size() + kMore;
  strategy.program.resize(compared, StepProgram(strategy.program.back()));
  strategy.program.push_back(other);
  const Result<PlannerOutput> truth = PlanOf(trace, strategy);
  EXPECT_EQ(plan.has_value(), truth.has_value());
  if (!plan || !truth) {
    if (!plan) {
      EXPECT_EQ(plan.error().code, ErrorCode::kBadInput) << ToString(plan.error());
    }
    return false;
  }
  for (std::size_t s = 0; s < compared; ++s) {
    const std::string difference =
        Difference(Lines(plan->plan, StepAt(plan->plan, s)), Lines(truth->plan, truth->plan.steps[s]));
    EXPECT_EQ(difference, "") << "step " << s << ", steady from step " << plan->plan.steady_step;
    if (!difference.empty()) break;
  }
  return true;
}

TEST(Fsdp1StateTest, StepsThatRepeatAreThoseThatThePolicyGoesOnToPlan) {
  const Trace trace = TraceWithBranches();
  std::size_t compared = 0;
  for (NamedStrategy& named : Strategies()) {
    for (const NamedProgram& program : LatePrograms()) {
      SCOPED_TRACE(named.name + ": " + program.name);
      named.strategy.program = program.steps;
      compared += StepsRepeatAsThePolicyGoesOn(trace, named.strategy) ? 1U : 0U;
    }
  }
  EXPECT_GT(compared, 600U);
}

StepProgram RandomStep(testing::Random& random) {
  const std::vector<std::vector<ProgramCall>> calls = {
      {Forward()},
      {Forward(1)},
      {Backward()},
      {Forward(), Backward()},
      {Forward(), Backward({0}, kNotTheFirstLayer)},
      {Forward(0, kWithoutGradients)},
      {Forward(2, kWithoutGradients, true)},
      {Forward(0, kWithGradients, false)},
      {kStateStep},
      {kStateZero},
      {Call("no_sync", true)},
      {Call("no_sync", false)},
      {Enter(), Leave()},
      {Enter({"with_grads"}), Leave()},
      {Enter({"offload_to_cpu"}), Leave()},
      {Enter({}, "layers.0", false), Leave("layers.0", false)}};
  StepProgram step = random.Chance(70) ? kUsual : StepProgram{};
  for (int n = random.Below(4); n > 0; --n) {
    const std::vector<ProgramCall>& added =
        calls[static_cast<std::size_t>(random.Below(static_cast<int>(calls.size())))];
    step.insert(step.begin() + random.Below(static_cast<int>(step.size()) + 1), added.begin(), added.end());
  }
  return step;
}

TEST(Fsdp1StateTest, StepsOfRandomProgramsRepeatAsThePolicyGoesOn) {
  const Trace trace = TraceWithBranches();
  std::vector<NamedStrategy> strategies = Strategies();
  std::size_t compared = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    testing::Random random(seed);
    NamedStrategy& named =
        strategies[static_cast<std::size_t>(random.Below(static_cast<int>(strategies.size())))];
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, named.name));
    named.strategy.program.clear();
    for (int steps = 1 + random.Below(4); steps > 0; --steps) {
      named.strategy.program.push_back(RandomStep(random));
    }
    compared += StepsRepeatAsThePolicyGoesOn(trace, named.strategy) ? 1U : 0U;
  }
  EXPECT_GT(compared, 150U);
}

// A call made late and one made from the beginning end in the same steps.
TEST(Fsdp1StateTest, ALateCallEndsInTheStepsOfAnEarlyOne) {
  const Trace trace = TraceWithBranches();
  std::vector<std::pair<std::string, StepProgram>> calls;
  for (const bool value : {true, false}) {
    for (const char* method : {"no_sync", "set_requires_gradient_sync"}) {
      calls.emplace_back(fmt::format("{}({})", method, value), StepProgram{Call(method, value)});
    }
  }
  for (const std::vector<std::string>& flags : kSummonFlags) {
    calls.emplace_back(fmt::format("summon_full_params({})", fmt::join(flags, ", ")),
                       StepProgram{Enter(flags), Leave()});
  }
  for (NamedStrategy& named : Strategies()) {
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(named.name + ": " + name);
      const StepProgram step = Joined(call, kUsual);
      named.strategy.program = {step};
      const Result<PlannerOutput> early = PlanOf(trace, named.strategy);
      named.strategy.program = {kUsual, kUsual, kUsual, step};
      const Result<PlannerOutput> late = PlanOf(trace, named.strategy);
      ASSERT_EQ(early.has_value(), late.has_value());
      if (!early) continue;
      const std::size_t far = 20;
      std::vector<std::string> of_late = Lines(late->plan, StepAt(late->plan, far));
      std::vector<std::string> of_early = Lines(early->plan, StepAt(early->plan, far));
      for (std::string& line : of_late) line = WithoutAgain(std::move(line));
      for (std::string& line : of_early) line = WithoutAgain(std::move(line));
      EXPECT_EQ(Difference(of_late, of_early), "");
    }
  }
}

// With full precision in evaluation a later forward may run in another dtype than the one whose gradient it
// drops.
TEST(Fsdp1StateTest, AGradientIsDroppedInTheDTypeThatItWasMadeIn) {
  Strategy strategy;
  strategy.policy = "fsdp1";
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
  strategy.fsdp1.full_precision_in_eval = true;
  strategy.fsdp1.use_orig_params = true;  // drops it in the next forward
  strategy.program = {
      Joined({Call("no_sync", true), Forward(), Backward(), Call("no_sync", false), kStateZero},
             {Forward(0, kWithoutGradients)})};
  const Result<PlannerOutput> plan = MakePlan(TraceWithBranches(), strategy, ClusterOf(2));
  ASSERT_TRUE(plan) << ToString(plan.error());
  std::vector<BufferId> made, dropped;
  for (const Trigger& trigger : plan->plan.steps.front().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kGradCopyIn) made.push_back(i.dst);
      if (i.kind == InstructionKind::kFree && i.reason == "zero_grad") dropped.push_back(i.src);
    }
  }
  EXPECT_FALSE(dropped.empty());
  EXPECT_THAT(dropped, ::testing::UnorderedElementsAreArray(made));
}

}  // namespace
}  // namespace shardplan
