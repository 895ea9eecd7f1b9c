// SPDX-License-Identifier: Apache-2.0
// The optimising planner on models with collectives and meshes of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "optimize/evaluator.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/reserved_memory.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using testing::kLoose;

constexpr std::int64_t kEightRanks = 8;

// Blocks of attention and experts between an embedding and a head. Experts lie on `ep`, and tokens go to them
// and come back.
Trace ExpertModel(int layers, std::int64_t rows = 1024, const std::string& container = "ModuleList") {
  testing::TreeModule list{.name = "layers", .class_name = container};
  for (int i = 0; i < layers; ++i) {
    list.children.push_back({.name = std::to_string(i),
                             .class_name = "Block",
                             .children = {{.name = "attn", .parameters = {{rows, 256}}},
                                          {.name = "experts", .parameters = {{4, rows, 256}}}}});
  }
  Trace trace = testing::TraceOf({.name = "",
                                  .children = {{.name = "embed", .parameters = {{rows, 256}}},
                                               list,
                                               {.name = "head", .parameters = {{rows, 256}}}}},
                                 1'000'000);
  trace.world_size = kEightRanks;
  trace.communicators = {{"ep", 4, 1}};
  for (Parameter& parameter : trace.parameters) {
    if (parameter.fqn.find("experts") != std::string::npos)
      parameter.placements = {{.mesh_dim = "ep", .size = 4, .dim = 0}};
  }
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    std::vector<TraceEvent> events;
    for (const TraceEvent& event : passes->front().events) {
      events.push_back(event);
      const auto* op = std::get_if<OperatorEvent>(&event);
      if (op == nullptr || trace.modules[op->module].fqn.find("experts") == std::string::npos) continue;
      OperatorEvent exchange{.name = "c10d.alltoall", .module = op->module};
      exchange.collective =
          ModelCollective{.kind = CollectiveKind::kAllToAll, .communicator = 0, .size_bytes = Bytes{1 << 20}};
      events.push_back(exchange);
    }
    passes->front().events = std::move(events);
  }
  return trace;
}

Cluster TwoNodes() {
  Cluster cluster = testing::BalancedCluster(kEightRanks, 4, 4'000'000'000);
  cluster.links.back() = {"outer", {2'000}, 4'000'000'000};
  return cluster;
}

OptimizeOptions InBudget(Bytes budget) { return {.budget = budget, .time_limit_ns = {0}, .threads = 2}; }

TEST(OptimizeMeshes, DecidesOverExpertsAndCertifies) {
  const Trace trace = ExpertModel(3);
  const Result<OptimizeOutput> output = Optimize(trace, {}, TwoNodes(), InBudget(kLoose));
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  EXPECT_TRUE(Verify(output->plan).empty());
  ASSERT_TRUE(output->certificate.has_value()) << output->report.notes.front();
  const Certificate& certificate = *output->certificate;
  EXPECT_EQ(certificate.meshes.size(), 2);
  EXPECT_GT(certificate.model_wait_ns.value, 0);
  EXPECT_LE(certificate.lower_bound_ns, certificate.step_ns);
  const Status checked = CheckCertificate(trace, output->plan, certificate);
  EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
  const auto apart = std::ranges::find(output->report.decisions, "apart", &DecisionReport::decision);
  EXPECT_NE(apart, output->report.decisions.end());
  Certificate wrong = certificate;
  wrong.meshes.pop_back();
  EXPECT_FALSE(CheckCertificate(trace, output->plan, wrong).has_value());
  wrong = certificate;
  wrong.model_wait_ns += Nanoseconds{1};
  EXPECT_FALSE(CheckCertificate(trace, output->plan, wrong).has_value());
}

// Experts alone kept, or all but the experts: units of the same plan differ, and both plans verify and are of
// the class.
TEST(OptimizeMeshes, KeepsExpertsApartFromTheDensePart) {
  const Trace trace = ExpertModel(3);
  const Result<OptimizeOutput> output = Optimize(trace, {}, TwoNodes(), InBudget(kLoose));
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  const optimize::Job job = optimize::MakeJob(trace, output->strategy, kEightRanks);
  ASSERT_EQ(job.other_meshes.size(), 3);
  for (const bool experts : {false, true}) {
    const optimize::Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kRoot),
                                  .kept = experts ? 0 : optimize::kAllUnits,
                                  .kept_apart = experts ? optimize::kAllUnits : 0};
    const Strategy strategy = optimize::StrategyOf(job, choice);
    const Result<PlannerOutput> planned = MakePlan(trace, strategy, TwoNodes());
    ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
    EXPECT_TRUE(CheckPlanClass(planned->plan).has_value());
    std::map<std::string, int> gathers;
    for (const Trigger& trigger : planned->plan.steps.back().triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllGather)
          ++gathers[planned->plan.units[static_cast<std::size_t>(i.unit)].fqn];
      }
    }
    EXPECT_EQ(gathers["layers.0[0]"], experts ? 2 : 1);
    EXPECT_EQ(gathers["layers.0[1]"], experts ? 1 : 2);
  }
}

// A group of blocks has experts in units of their own.
TEST(OptimizeMeshes, JoinsTheDensePartOfBlocks) {
  const Trace trace = ExpertModel(4, 256, "ModuleDict");
  const Result<OptimizeOutput> output = Optimize(trace, {}, TwoNodes(), InBudget(kLoose));
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  const optimize::Job job = optimize::MakeJob(trace, output->strategy, kEightRanks);
  ASSERT_EQ(job.chain.blocks, 4);
  const optimize::Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 2, optimize::Ends::kRoot)};
  const Result<PlannerOutput> planned = MakePlan(trace, optimize::StrategyOf(job, choice), TwoNodes());
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  EXPECT_TRUE(CheckPlanClass(planned->plan).has_value());
  const auto experts = std::ranges::count_if(planned->plan.units, [](const Unit& unit) {
    return unit.parameters.size() == 1 && !unit.parameters[0].placements.empty();
  });
  EXPECT_EQ(experts, 4);
}

// A loop that names its units, lists of what is prefetched, blocks kept by hand: in its own memory the job is
// never slower than as it is given.
TEST(OptimizeMeshes, NeverSlowerThanAsGivenInItsMemory) {
  for (const bool communicates : {false, true}) {
    Trace trace = ExpertModel(3);
    if (!communicates) {
      trace.communicators.clear();
      for (Parameter& parameter : trace.parameters) parameter.placements.clear();
      for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
        std::erase_if(passes->front().events, [](const TraceEvent& event) {
          const auto* op = std::get_if<OperatorEvent>(&event);
          return op != nullptr && op->collective;
        });
      }
    }
    Strategy given{.units = {{.modules = {"embed"}},
                             {.modules = {"layers.0"}},
                             {.modules = {"layers.1"}},
                             {.modules = {"layers.2"}},
                             {.modules = {"head"}},
                             {.modules = {""}}}};
    given.units[4].reshard_after_forward = false;
    given.fsdp2.forward_prefetch_lists = {{"embed", {"layers.0", "layers.1"}}, {"layers.0", {"layers.2"}}};
    given.program = {{ForwardCall{0, 0},
                      ModuleCall{.method = "set_reshard_after_backward", .module = "head", .value = false},
                      BackwardCall{{0}, 0},
                      ModuleCall{.method = "set_reshard_after_backward", .module = "head", .value = true},
                      OptimizerStepCall{}, ZeroGradCall{}}};
    const Result<PlannerOutput> planned = MakePlan(trace, given, TwoNodes());
    ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
    const Bytes memory = *ReservedWithoutBudget(planned->plan, {});
    for (const std::int64_t plans : {1, 1500}) {
      OptimizeOptions options = InBudget(memory);
      options.plan_limit = plans;
      const Result<OptimizeOutput> output = Optimize(trace, given, TwoNodes(), options);
      ASSERT_TRUE(output.has_value()) << ToString(output.error());
      EXPECT_LE(output->report.step_ns, testing::StepOf(planned->plan)) << plans << " plans";
      EXPECT_LE(output->report.peak_reserved_bytes, memory);
      const auto as_given = std::ranges::find(output->report.baselines, "as given", &BaselineReport::name);
      ASSERT_NE(as_given, output->report.baselines.end());
      EXPECT_EQ(as_given->step_ns, testing::StepOf(planned->plan));
    }
  }
}

}  // namespace
}  // namespace shardplan
