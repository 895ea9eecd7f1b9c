// SPDX-License-Identifier: Apache-2.0
// Policies that are not built in: whatever one decides about its units within reason verifies, and whatever
// it does wrong is an error that names it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "shardplan/planner/planner.h"
#include "shardplan/planner/policy.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/random_cases.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::HasSubstr;
using testing::RandomCase;

bool Fetches(const HookPoint& point) {
  return point.kind == HookPointKind::kPreForward || point.kind == HookPointKind::kRecomputePreForward ||
         point.kind == HookPointKind::kPreBackward;
}

class WithUnits : public Policy {
 public:
  WithUnits(const PolicyInput& input, ProgramBuilder& builder) : units_(input, builder) {}
  Status SetUp() override { return units_.SetUp(); }
  Status Procedures() override { return units_.Procedures(); }
  std::unique_ptr<PolicyState> State() const override {
    return std::make_unique<PolicyStateOf<UnitOperations::State>>(units_.state());
  }

 protected:
  UnitOperations units_;
};

// Gathers a unit where its module's hook runs, at the latest. All else by chance, the same in every step:
// gathers of others, what is kept, when gradients are reduced.
class ByChance : public WithUnits {
 public:
  ByChance(const PolicyInput& input, ProgramBuilder& builder)
      : WithUnits(input, builder),
        count_(static_cast<int>(builder.plan().units.size())),
        seed_(static_cast<std::uint32_t>(input.Knob<std::int64_t>("seed"))) {}

  void BeginStep(const RecordedStep& /*step*/) override { random_ = testing::Random(seed_); }

  Status On(const HookPoint& point) override {
    if (Status begun = units_.Begin(point); !begun) return begun;
    if (Fetches(point)) {
      units_.Gather(point.unit);
      if (random_.Chance(30)) units_.Gather(random_.Below(count_));
      units_.Await(point.unit);
      if (random_.Chance(30)) units_.Gather(random_.Below(count_));
    }
    if (point.kind == HookPointKind::kPostForward && random_.Chance(60)) units_.Free(point.unit);
    if (point.kind == HookPointKind::kInputsGradDone && random_.Chance(70)) units_.Reduce(point.unit);
    if (point.kind == HookPointKind::kInputsGradDone && random_.Chance(70)) units_.Free(point.unit);
    if (point.kind == HookPointKind::kBackwardEnd) units_.EndBackward();
    const bool between = point.kind == HookPointKind::kOptimizerStep ||
                         point.kind == HookPointKind::kZeroGrad || point.kind == HookPointKind::kBackwardEnd;
    for (UnitId unit = 0; between && unit < count_; ++unit) {
      if (random_.Chance(30)) units_.Free(unit);
      if (random_.Chance(10)) units_.Gather(unit);
    }
    return {};
  }

 private:
  const int count_;
  const std::uint32_t seed_;
  testing::Random random_{0};
};

template <typename T>
std::unique_ptr<Policy> Make(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<T>(input, builder);
}

// A random case of fsdp2 or fsdp1 as one of another policy, which knows two of the calls.
testing::RandomPlanCase CaseOf(std::uint32_t seed, const std::string& policy) {
  testing::RandomPlanCase c = RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
  c.strategy.policy = policy;
  c.strategy.fsdp1 = {};
  c.strategy.setup.clear();
  for (StepProgram& step : c.strategy.program) {
    std::erase_if(step, [](const ProgramCall& call) {
      const auto* module = std::get_if<ModuleCall>(&call);
      return module != nullptr && module->method != "set_requires_gradient_sync";
    });
  }
  return c;
}

TEST(OwnPolicyTest, WhateverIsGatheredKeptAndReducedByChanceVerifies) {
  const PolicyDescription by_chance{
      .name = "by_chance", .knobs = {{"seed", 0, "", ""}}, .make = Make<ByChance>, .library = {}};
  int verified = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomPlanCase c = CaseOf(seed, "by_chance");
    c.strategy.policy_knobs["seed"] = seed;
    const PlanOptions options{.verify = false, .policy = &by_chance};
    const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options);
    if (!planned && planned.error().pointer.starts_with("/units"))
      continue;  // fsdp1's rules, which fsdp2 refuses
    ASSERT_TRUE(planned) << ToString(planned.error()) << "\n" << ToJson(c.strategy);
    const std::vector<Violation> violations = Verify(planned->plan);
    ASSERT_TRUE(violations.empty()) << Explain(planned->plan, violations.front()) << "\n"
                                    << ToJson(c.strategy) << PlanText(planned->plan);
    const std::string bytes = ToJson(planned->plan);
    const Result<Plan> read = ParsePlan(bytes);
    ASSERT_TRUE(read) << ToString(read.error());
    ASSERT_EQ(*read, planned->plan);
    ASSERT_EQ(ToJson(MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), options)->plan), bytes);
    ++verified;
  }
  EXPECT_GT(verified, 200);
}

// FSDP2 without any prefetch, through the operations.
class LikeFsdp2 : public WithUnits {
 public:
  LikeFsdp2(const PolicyInput& input, ProgramBuilder& builder)
      : WithUnits(input, builder), count_(static_cast<int>(builder.plan().units.size())) {}
  Status On(const HookPoint& point) override {
    if (Status begun = units_.Begin(point); !begun) return begun;
    if (Fetches(point)) {
      units_.Gather(point.unit);
      units_.Await(point.unit);
    }
    if (point.kind == HookPointKind::kPostForward) units_.Free(point.unit);
    if (point.kind == HookPointKind::kInputsGradDone) units_.Free(point.unit);
    if (point.kind == HookPointKind::kInputsGradDone) units_.Reduce(point.unit);
    if (point.kind != HookPointKind::kBackwardEnd) return {};
    units_.EndBackward();
    for (UnitId unit = 0; unit < count_; ++unit) units_.Free(unit);  // whose inputs need no gradient
    return {};
  }

 private:
  const int count_;
};

// How often each kind of work moves which buffers in the step that repeats.
std::map<std::string, int> Work(const Plan& plan) {
  std::map<std::string, int> work;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) {
      const bool orders = i.kind == InstructionKind::kRecord || i.kind == InstructionKind::kWait;
      if (orders || i.kind == InstructionKind::kCompute) continue;
      const auto name = [&](BufferId buffer) { return buffer < 0 ? "" : " " + plan.buffers[buffer].name; };
      ++work[std::string(Name(i.kind)) + name(i.src) + name(i.dst)];
    }
  }
  return work;
}

TEST(OwnPolicyTest, OperationsAreFsdp2sOwn) {
  const PolicyDescription like{.name = "like_fsdp2", .knobs = {}, .make = Make<LikeFsdp2>, .library = {}};
  int compared = 0;
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    testing::RandomPlanCase c = CaseOf(seed, "fsdp2");
    c.strategy.program.clear();
    c.strategy.checkpoint.reset();
    c.strategy.reshard_after_forward = true;
    c.strategy.fsdp2.backward_prefetch = c.strategy.fsdp2.forward_prefetch = 0;
    c.strategy.fsdp2.forward_prefetch_lists = c.strategy.fsdp2.backward_prefetch_lists = {};
    for (UnitRule& rule : c.strategy.units) rule.reshard_after_forward = true;
    const Result<PlannerOutput> fsdp2 = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks));
    c.strategy.policy = like.name;
    const Result<PlannerOutput> own = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), {.policy = &like});
    ASSERT_EQ(fsdp2.has_value(), own.has_value()) << ToJson(c.strategy);
    if (!fsdp2) continue;
    ASSERT_EQ(Work(fsdp2->plan), Work(own->plan)) << ToJson(c.strategy);
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

// ---- what a policy does wrong ----

class Wrong : public WithUnits {
 public:
  Wrong(const PolicyInput& input, ProgramBuilder& builder)
      : WithUnits(input, builder), builder_(builder), mistake_(input.Knob<std::string>("mistake")) {
    if (mistake_ == "throw in make") throw std::runtime_error("out of ideas");
    if (mistake_ == "knob") (void)input.Knob<bool>("mistake");
  }
  Status SetUp() override {
    if (mistake_ == "refuse")
      return MakeInputError("/policy_knobs/mistake", "is a mistake", mistake_, "none");
    return units_.SetUp();
  }
  std::unique_ptr<PolicyState> State() const override {
    return std::make_unique<PolicyStateOf<int>>(mistake_ == "count" ? count_++ : 0);
  }
  Status On(const HookPoint& point) override {
    if (mistake_ == "throw") throw 7;
    if (mistake_ == "no trigger") return {};
    if (mistake_ == "count") builder_.BeginTrigger(TriggerKind::kUserCall, -1, count_);
    if (Status begun = units_.Begin(point); !begun) return begun;
    if (mistake_ == "unit") units_.Gather(99);
    if (mistake_ == "stream") builder_.Record(builder_.Event("e"), 12);
    if (mistake_ == "buffer") builder_.Free(-1, kCompute);
    if (mistake_ == "event") builder_.Wait(1000, kCompute);
    if (mistake_ == "reference") builder_.Emit(InstructionKind::kCopyOut, kCompute).src = 1'000'000;
    if (mistake_ == "segment") builder_.Compute({.kind = HookPointKind::kZeroGrad}, {}, {});
    return {};
  }

 private:
  ProgramBuilder& builder_;
  const std::string mistake_;
  mutable int count_ = 0;
};

TEST(OwnPolicyTest, MistakesAreErrorsThatNameThePolicy) {
  const PolicyDescription wrong{.name = "wrong",
                                .knobs = {{"mistake", std::string(), "", ""}},
                                .make = Make<Wrong>,
                                .library = "libwrong.so"};
  const std::map<std::string, std::string> says = {
      {"throw in make", "it has thrown an exception: out of ideas"},
      {"throw", "it has thrown an exception that is no std::exception"},
      {"knob", "no knob of this type is described: mistake"},
      {"refuse", "is a mistake"},
      {"count", "the policy's state does not repeat from step to step"},
      {"no trigger", "its plan does not verify"},
      {"", "its plan does not verify: use_before_unshard"},
      {"unit", "an operation is on unit 99"},
      {"stream", "record is issued on stream 12, which Stream() has not given"},
      {"buffer", "buffer -1 is used, which AddBuffer() has not given"},
      {"event", "event 1000 is used, which Event() has not given"},
      {"reference", "its plan does not verify: reference"},
      {"segment", "the model computes at a point that is no segment"}};
  for (const auto& [mistake, expected] : says) {
    SCOPED_TRACE(mistake);
    testing::RandomPlanCase c = CaseOf(4, "wrong");
    c.strategy.policy_knobs["mistake"] = mistake;
    const Result<PlannerOutput> planned =
        MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), {.policy = &wrong});
    ASSERT_FALSE(planned);
    EXPECT_EQ(planned.error().code, ErrorCode::kBadInput);
    EXPECT_THAT(ToString(planned.error()), HasSubstr("policy wrong (libwrong.so)"));
    EXPECT_THAT(ToString(planned.error()), HasSubstr(expected));
  }
}

TEST(OwnPolicyTest, KnobsAreCheckedAgainstTheDescription) {
  const PolicyDescription own{
      .name = "own",
      .knobs = {{"seed", 3, "", ""}, {"share", 0.5, "", ""}, {"name", std::string("x"), "", ""}},
      .make = Make<ByChance>,
      .library = {}};
  testing::RandomPlanCase c = CaseOf(4, "own");
  c.strategy.policy_knobs = {{"share", KnobValue(2)}};
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), {.policy = &own});
  ASSERT_TRUE(planned) << ToString(planned.error());
  const std::map<std::string, KnobValue> expected = {{"name", std::string("x")}, {"seed", 3}, {"share", 2}};
  EXPECT_EQ(planned->plan.strategy.policy_knobs, expected);
  EXPECT_EQ(planned->plan.policy, "own");

  const auto error_of = [&](std::map<std::string, KnobValue> knobs) {
    c.strategy.policy_knobs = std::move(knobs);
    return MakePlan(c.trace, c.strategy, ClusterOf(c.ranks), {.policy = &own}).error();
  };
  EXPECT_EQ(error_of({{"speed", 1}}).pointer, "/policy_knobs/speed");
  EXPECT_THAT(error_of({{"speed", 1}}).expected, HasSubstr("seed, share, name"));
  EXPECT_EQ(error_of({{"seed", 1.5}}).found, "a number");
  EXPECT_EQ(error_of({{"seed", true}}).expected, "a whole number");
  c.strategy.policy = "another";
  EXPECT_EQ(error_of({}).pointer, "/policy");
}

}  // namespace
}  // namespace shardplan
