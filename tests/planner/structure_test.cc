// SPDX-License-Identifier: Apache-2.0
// The plans of three equal layers, in full: what is issued where, and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/planned.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::LayeredTrace;
using testing::Planned;

// "trigger unit: collectives" of the steady step.
std::vector<std::string> Collectives(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) {
      const bool collective = i.kind == InstructionKind::kAllGather ||
                              i.kind == InstructionKind::kReduceScatter ||
                              i.kind == InstructionKind::kAllReduce;
      if (!collective) continue;
      const BufferId buffer = i.kind == InstructionKind::kAllGather ? i.dst : i.src;
      lines.push_back(std::string(Name(trigger.kind)) + " " +
                      (trigger.unit < 0 ? "-" : plan.units[trigger.unit].fqn) + ": " +
                      std::string(Name(i.kind)) + " " + plan.units[plan.buffers[buffer].unit].fqn);
    }
  }
  return lines;
}

TEST(Fsdp2StructureTest, DefaultGathersOnDemandForwardAndOneAheadBackward) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8), {}, 4);
  EXPECT_THAT(
      Collectives(plan),
      ElementsAre(
          "pre_forward layers.0: all_gather layers.0", "pre_forward layers.1: all_gather layers.1",
          "pre_forward layers.2: all_gather layers.2", "pre_backward layers.2: all_gather layers.2",
          "pre_backward layers.2: all_gather layers.1", "post_backward layers.2: reduce_scatter layers.2",
          "pre_backward layers.1: all_gather layers.0", "post_backward layers.1: reduce_scatter layers.1",
          "backward_end -: reduce_scatter layers.0"));
}

TEST(Fsdp2StructureTest, RootWithParametersStaysGatheredAndPrefetchesTheLastBlock) {
  const Plan plan = Planned(LayeredTrace(2, 8, 8, 16), {}, 4);
  EXPECT_THAT(
      Collectives(plan),
      ElementsAre("pre_forward : all_gather ", "pre_forward layers.0: all_gather layers.0",
                  "pre_forward layers.1: all_gather layers.1", "pre_backward : all_gather layers.1",
                  "pre_backward layers.1: all_gather layers.0",
                  "post_backward layers.1: reduce_scatter layers.1",
                  "post_backward layers.0: reduce_scatter layers.0", "backward_end -: reduce_scatter "));
}

TEST(Fsdp2StructureTest, NoReshardSavesTheBackwardGathers) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8), {.reshard_after_forward = false}, 4);
  int gathers = 0;
  for (const std::string& line : Collectives(plan)) gathers += line.find("all_gather") != std::string::npos;
  EXPECT_EQ(gathers, 3);
}

// foreach_reduce's loop over the gradients leaves a name for the last one; on one rank there is no loop.
// In 2.15 the loop is a function's.
TEST(Fsdp2StructureTest, TheLastGradientOfAUnitLivesUntilItsReductionIsIssued) {
  const Trace trace = testing::TraceOf(
      {.children = {{.name = "one", .parameters = {{8, 8}}}, {.name = "two", .parameters = {{8, 8}, {8}}}}});
  Strategy strategy{.units = {{.modules = {"one"}}, {.modules = {"two"}}},
                    .mixed_precision = MixedPrecision{.reduce_dtype = DType::kBFloat16}};
  for (const PyTorchVersion release : {PyTorchVersion::k2_11, PyTorchVersion::k2_15}) {
    for (const std::int64_t ranks : {1, 4}) {
      strategy.pytorch = release;
      const Plan plan = Planned(trace, strategy, ranks);
      std::map<std::string, std::vector<std::string>> order;
      for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
        for (const Instruction& i : trigger.instructions) {
          const BufferId buffer = i.kind == InstructionKind::kFree ? i.src : i.dst;
          if (buffer < 0 || plan.buffers[buffer].unit < 0) continue;
          const BufferRole role = plan.buffers[buffer].role;
          const bool free = i.kind == InstructionKind::kFree && role == BufferRole::kGradUnsharded;
          const bool cast = i.kind == InstructionKind::kGradCast && role == BufferRole::kGradSharded;
          std::string text(Name(i.kind));
          for (const std::int32_t part : i.parts) text += " " + std::to_string(part);
          if (free || cast) order[plan.units[plan.buffers[buffer].unit].fqn].push_back(text);
        }
      }
      if (ranks == 1 || release == PyTorchVersion::k2_15) {
        EXPECT_THAT(order["one"], ElementsAre("free", "grad_cast"));
        EXPECT_THAT(order["two"], ElementsAre("free", "grad_cast"));
      } else {
        EXPECT_THAT(order["one"], ElementsAre("grad_cast", "free"));
        EXPECT_THAT(order["two"], ElementsAre("free 0", "grad_cast", "free"));
      }
    }
  }
}

TEST(Fsdp1StructureTest, DefaultLimitsTheHostAndGathersOneAheadInTheBackward) {
  const Plan plan = Planned(LayeredTrace(3, 8, 8), {.policy = "fsdp1"}, 4);
  EXPECT_THAT(
      Collectives(plan),
      ElementsAre(
          "pre_forward layers.0: all_gather layers.0", "pre_forward layers.1: all_gather layers.1",
          "pre_forward layers.2: all_gather layers.2", "pre_backward layers.2: all_gather layers.2",
          "pre_backward layers.2: all_gather layers.1", "post_backward layers.2: reduce_scatter layers.2",
          "pre_backward layers.1: all_gather layers.0", "post_backward layers.1: reduce_scatter layers.1",
          "post_backward layers.0: reduce_scatter layers.0"));
  std::int64_t waits = 0;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) waits += i.kind == InstructionKind::kHostWait;
  }
  EXPECT_EQ(waits, 6);  // from the second step on every all-gather finds two frees pending
}

// Nothing is trained: no backward tells the runtime that a step is over, and two events of the rate limiter
// take turns from step to step.
TEST(Fsdp1StructureTest, StepsOfAFrozenModelRepeatInTurns) {
  const Trace trace =
      testing::TraceOf({.parameters = {{8, 8}},
                        .trainable = false,
                        .children = {{.name = "a", .parameters = {{8, 8}}, .trainable = false}}});
  const Plan plan = Planned(trace,
                            {.policy = "fsdp1",
                             .units = {{.modules = {"a"}}, {.modules = {""}}},
                             .fsdp1 = {.use_orig_params = true}},
                            4);
  ASSERT_EQ(std::ssize(plan.steps), plan.steady_step + 2);
  EXPECT_NE(plan.steps[plan.steady_step].triggers, plan.steps[plan.steady_step + 1].triggers);
  EXPECT_THAT(Verify(plan), IsEmpty());
  EXPECT_THAT(Collectives(plan), ElementsAre("pre_forward a: all_gather a"));  // the root stays gathered
}

TEST(StructureTest, EverythingInTheTraceIsInTheStepOnce) {
  const Trace trace = LayeredTrace(3, 8, 8, 16);
  for (const char* policy : {"fsdp2", "fsdp1"}) {
    const Plan plan = Planned(trace, {.policy = policy}, 4);
    std::map<std::string, int> made;
    for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind != InstructionKind::kCompute) continue;
        for (const SegmentEntry& entry : plan.segments[i.segment].entries)
          ++made[std::to_string(entry.index())];
        made["grads"] += static_cast<int>(plan.segments[i.segment].grads.size());
      }
    }
    std::map<std::string, int> traced;
    for (const auto* passes : {&trace.forwards, &trace.backwards}) {
      for (const Pass& pass : *passes) {
        for (const TraceEvent& event : pass.events) {
          if (std::holds_alternative<OperatorEvent>(event)) ++traced["0"];
          if (std::holds_alternative<AllocateEvent>(event)) ++traced["1"];
          if (std::holds_alternative<FreeEvent>(event)) ++traced["2"];
          if (std::holds_alternative<ParameterGradEvent>(event)) ++traced["grads"];
        }
      }
    }
    EXPECT_EQ(made, traced) << policy;
  }
}

TEST(StructureTest, AccumulationWithoutSyncHoldsGradientsAndReducesOnce) {
  Strategy strategy{.mixed_precision =
                        MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32}};
  strategy.program = {{ModuleCall{.method = "set_requires_gradient_sync", .value = false}, ForwardCall{0, 0},
                       BackwardCall{{0}, 0},
                       ModuleCall{.method = "set_requires_gradient_sync", .value = true}, ForwardCall{1, 0},
                       BackwardCall{{1}, 0}, OptimizerStepCall{}, ZeroGradCall{}}};
  const Plan plan = Planned(LayeredTrace(3, 8, 8), strategy, 4);
  int reductions = 0, held = 0;
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    for (const Instruction& i : trigger.instructions) {
      reductions += i.kind == InstructionKind::kReduceScatter;
      held += i.kind == InstructionKind::kAllocate &&
              plan.buffers[i.dst].role == BufferRole::kGradUnshardedAccumulated;
      if (i.kind == InstructionKind::kReduceScatter) {
        EXPECT_EQ(trigger.microbatch, 1);
      }
    }
  }
  EXPECT_EQ(reductions, 3);
  EXPECT_EQ(held, 3);
  EXPECT_EQ(plan.tokens_per_step, 16);
}

TEST(StructureTest, GraphIsWrittenAsGraphViz) {
  const Result<PlannerOutput> planned = MakePlan(LayeredTrace(2, 8, 8), {}, ClusterOf(2));
  ASSERT_TRUE(planned);
  const std::string graph = ScheduleGraphviz(planned->plan, planned->plan.steady_step);
  EXPECT_TRUE(graph.starts_with("digraph"));
  EXPECT_NE(graph.find("forward layers.1"), std::string::npos);
  EXPECT_NE(graph.find("reduce_scatter"), std::string::npos);
}

TEST(StructureTest, EveryPolicySaysItsKnobsToTheOtherPackages) {
  for (const std::string& policy : PlannerPolicies()) EXPECT_EQ(KnobsOf(policy).name, policy);
  EXPECT_EQ(AllPolicyKnobs().size(), PlannerPolicies().size());
}

TEST(StructureTest, PassesAreReportedInOrder) {
  std::vector<std::string> names;
  const auto on_pass = [&](std::string_view name, Nanoseconds wall_ns) {
    EXPECT_GE(wall_ns.value, 0);
    names.emplace_back(name);
  };
  ASSERT_TRUE(MakePlan(LayeredTrace(2, 8, 8), {}, ClusterOf(2), {.on_pass = on_pass}));
  EXPECT_THAT(names, ElementsAre("apply_checkpointing", "fuse_operators", "choose_units", "split_ties",
                                 "extend_gradients", "join_tensors", "record_order", "offload_activations",
                                 "place_events", "await_copies", "build_graph", "linearise", "describe",
                                 "digest", "verify"));
}

}  // namespace
}  // namespace shardplan
