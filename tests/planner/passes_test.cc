// SPDX-License-Identifier: Apache-2.0
// The passes through the library: their list, stopping behind one, leaving one out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"
#include "tests/planner/planned.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LayeredTrace;
using ::testing::Not;
using testing::Planned;

TEST(PassesTest, TheListIsWhatRuns) {
  std::vector<std::string> names, ran;
  for (const PlannerPass& pass : PlannerPasses()) names.emplace_back(pass.name);
  const auto on_pass = [&](std::string_view name, Nanoseconds) { ran.emplace_back(name); };
  ASSERT_TRUE(MakePlan(LayeredTrace(2, 8, 8), {}, ClusterOf(2), {.on_pass = on_pass}));
  EXPECT_EQ(ran, names);
}

TEST(PassesTest, NoPassRunsBehindTheOneToStopAfter) {
  std::vector<std::string> ran;
  const auto on_pass = [&](std::string_view name, Nanoseconds) { ran.emplace_back(name); };
  const Result<PassOutput> made =
      RunPassesUntil("choose_units", LayeredTrace(2, 8, 8), {}, ClusterOf(2), {.on_pass = on_pass});
  ASSERT_TRUE(made) << ToString(made.error());
  EXPECT_THAT(ran, ElementsAre("apply_checkpointing", "fuse_operators", "choose_units"));
  EXPECT_EQ(made->makes, "units");
  EXPECT_THAT(made->text, HasSubstr("unit 1: layers.0\n"));
  EXPECT_THAT(made->text, HasSubstr("sharded over 2 ranks (shard, stride 1)"));
  EXPECT_THAT(made->text, HasSubstr("layers.1.weight"));
}

// Every pass that rewrites the trace hands on a document that is read again.
TEST(PassesTest, RewrittenTracesAreDocuments) {
  const Trace trace = LayeredTrace(3, 8, 8, 16);
  const Strategy strategy{.checkpoint = CheckpointRule{.modules = {"layers.*"}}};
  for (const PlannerPass& pass : PlannerPasses()) {
    if (pass.makes != "trace") continue;
    const Result<PassOutput> made = RunPassesUntil(pass.name, trace, strategy, ClusterOf(4));
    ASSERT_TRUE(made) << pass.name;
    const Result<Trace> read = ParseTrace(made->text);
    ASSERT_TRUE(read) << pass.name << ": " << ToString(read.error());
    EXPECT_NE(*read, trace) << pass.name;  // checkpointed, at least
    EXPECT_EQ(Planned(*read, {}, 4).steps, Planned(trace, strategy, 4).steps) << pass.name;
  }
}

// A unit whose outputs are where hooks do not find them (a dataclass, say).
TEST(PassesTest, AUnitWhoseBackwardIsNotSeenIsRefusedByName) {
  const Trace seen = LayeredTrace(3, 8, 8, 16);
  for (const std::string layer : {"layers.0", "layers.1", "layers.2"}) {
    Trace trace = seen;
    const auto of_layer = [&](const TraceEvent& event) {
      const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
      return ready != nullptr && trace.modules[ready->module].fqn == layer;
    };
    ASSERT_EQ(std::erase_if(trace.backwards[0].events, of_layer), 1) << layer;
    Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
    const Result<PlannerOutput> refused = MakePlan(trace, strategy, ClusterOf(2));
    ASSERT_FALSE(refused) << layer;
    EXPECT_EQ(refused.error().code, ErrorCode::kBadInput) << ToString(refused.error());
    EXPECT_THAT(refused.error().message, HasSubstr("unit " + layer + ": its backward is not seen to begin"));
    EXPECT_THAT(refused.error().message, HasSubstr("use_reentrant=False"));
    for (UnitRule& rule : strategy.units) rule.reshard_after_forward = ReshardAfterForward{false};
    const Result<PlannerOutput> kept = MakePlan(trace, strategy, ClusterOf(2));
    EXPECT_TRUE(kept) << layer << ": " << ToString(kept.error());
  }
}

// A loss that calls a module inside of the root by itself, and runs it backward.
TEST(PassesTest, AModuleThatIsCalledByItselfIsToBeAUnit) {
  Trace trace = LayeredTrace(3, 8, 8, 16);
  const auto is_of = [&](ModuleId module) {
    const std::string& fqn = trace.modules[module].fqn;
    return fqn == "layers.0" || fqn.starts_with("layers.0.");
  };
  const auto keep = [&](const TraceEvent& event) {
    const auto* enter = std::get_if<EnterEvent>(&event);
    const auto* exit = std::get_if<ExitEvent>(&event);
    return enter != nullptr ? is_of(enter->module) : exit == nullptr || is_of(exit->module);
  };
  std::erase_if(trace.forwards[0].events, [&](const TraceEvent& event) { return !keep(event); });
  std::erase_if(trace.backwards[0].events, [&](const TraceEvent& event) {
    const auto* ready = std::get_if<OutputGradReadyEvent>(&event);
    const auto* done = std::get_if<InputsGradDoneEvent>(&event);
    return (ready != nullptr && !is_of(ready->module)) || (done != nullptr && !is_of(done->module));
  });
  ASSERT_TRUE(CheckTrace(trace)) << ToString(CheckTrace(trace).error());
  const Result<PlannerOutput> refused =
      MakePlan(trace, {.policy = "fsdp1", .units = {{.modules = {""}}}}, ClusterOf(2));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput) << ToString(refused.error());
  EXPECT_THAT(refused.error().message, HasSubstr("does not call the unit's module"));
  EXPECT_THAT(refused.error().message, HasSubstr("--unit"));
}

TEST(PassesTest, ATieIsSplitInTheTraceThatIsHandedOn) {
  Trace trace = LayeredTrace(2, 8, 8);
  ParameterId shared = -1;
  for (Module& module : trace.modules) {
    for (NamedParameter& named : module.parameters) {
      if (shared < 0) shared = named.parameter;
      named.parameter = shared;
    }
  }
  trace.parameters.resize(1);
  trace.parameters[0].shared_with = {"layers.1.weight"};
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (Pass& pass : *passes) {
      std::erase_if(pass.events, [&](TraceEvent& event) {
        if (auto* op = std::get_if<OperatorEvent>(&event)) {
          for (ParameterId& parameter : op->parameters) parameter = shared;
        } else if (auto* allocate = std::get_if<AllocateEvent>(&event)) {
          if (allocate->parameter >= 0) allocate->parameter = shared;
        }
        const auto* grad = std::get_if<ParameterGradEvent>(&event);
        return grad != nullptr && grad->parameter != shared;
      });
    }
  }
  const Strategy old = {.pytorch = PyTorchVersion::k2_11};
  const Result<PassOutput> before = RunPassesUntil("choose_units", trace, old, ClusterOf(2));
  ASSERT_TRUE(before) << ToString(before.error());
  const Result<PassOutput> made = RunPassesUntil("split_ties", trace, old, ClusterOf(2));
  ASSERT_TRUE(made) << ToString(made.error());
  const Result<Trace> split = ParseTrace(made->text);
  ASSERT_TRUE(split) << ToString(split.error());
  EXPECT_EQ(split->parameters.size(), 2u);
  EXPECT_TRUE(split->parameters[1].shared_with.empty());

  // 2.15 refuses two such units under one root, and nothing where each is a root of its own.
  Strategy refused = {.pytorch = PyTorchVersion::k2_15};
  const Result<PassOutput> tied = RunPassesUntil("split_ties", trace, refused, ClusterOf(2));
  ASSERT_FALSE(tied);
  EXPECT_EQ(tied.error().pointer, "/units");
  EXPECT_THAT(ToString(tied.error()), HasSubstr("layers.0.weight0 is shared by modules of two units"));
  refused.fsdp2.shard_root = false;
  EXPECT_TRUE(RunPassesUntil("split_ties", trace, refused, ClusterOf(2)));
}

TEST(PassesTest, WhatOthersNeedIsNotSkipped) {
  const Trace trace = LayeredTrace(2, 8, 8);
  const Plan whole = Planned(trace, {});
  for (const PlannerPass& pass : PlannerPasses()) {
    const Result<PlannerOutput> planned =
        MakePlan(trace, {}, ClusterOf(2), {.skip = {std::string(pass.name)}});
    if (pass.needed_by.empty()) {
      ASSERT_TRUE(planned) << pass.name;
      EXPECT_EQ(planned->plan.steps, whole.steps) << pass.name;
    } else {
      ASSERT_FALSE(planned) << pass.name;
      EXPECT_EQ(planned.error().code, ErrorCode::kUsage);
      EXPECT_THAT(planned.error().message, HasSubstr(std::string(pass.name)));
    }
  }
}

TEST(PassesTest, ASkippedPassChangesWhatItWouldHave) {
  const Trace trace = LayeredTrace(3, 8, 8);
  const Strategy strategy{.checkpoint = CheckpointRule{.modules = {"layers.*"}}};
  const Result<PlannerOutput> planned =
      MakePlan(trace, strategy, ClusterOf(2), {.skip = {"apply_checkpointing"}});
  ASSERT_TRUE(planned);
  EXPECT_EQ(planned->plan.steps, Planned(trace, {}).steps);
  EXPECT_THAT(planned->plan.steps, Not(Planned(trace, strategy).steps));
}

TEST(PassesTest, APassThatDoesNotExistIsAUsageError) {
  const Result<PassOutput> made = RunPassesUntil("lineup", LayeredTrace(2, 8, 8), {}, ClusterOf(2));
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kUsage);
  EXPECT_THAT(made.error().expected, HasSubstr("record_order"));
}

TEST(PassesTest, AnUnknownPolicyIsBadInputAtItsField) {
  const Result<PlannerOutput> planned = MakePlan(LayeredTrace(2, 8, 8), {.policy = "fsdp3"}, ClusterOf(2));
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(planned.error().pointer, "/policy");
}

}  // namespace
}  // namespace shardplan
