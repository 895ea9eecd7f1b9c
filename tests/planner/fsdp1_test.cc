// SPDX-License-Identifier: Apache-2.0
// fsdp1: what the recordings do not show. The rules of wrap policies, the order of post-backwards of nested
// units, user calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "shardplan/planner/planner.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/planned.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::ClusterOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::LayeredTrace;
using ::testing::Not;
using testing::Planned;
using testing::UnitNames;

Strategy Flat() {
  Strategy strategy;
  strategy.policy = "fsdp1";
  return strategy;
}

std::vector<const Instruction*> Instructions(const Plan& plan, InstructionKind kind) {
  std::vector<const Instruction*> found;
  for (const Trigger& trigger : plan.steps.front().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == kind) found.push_back(&i);
    }
  }
  return found;
}

std::int64_t Largest(const Trace& trace) {
  std::int64_t most = 0;
  for (const Parameter& parameter : trace.parameters) {
    std::int64_t numel = 1;
    for (const std::int64_t size : parameter.shape) numel *= size;
    most = std::max(most, numel);
  }
  return most;
}

TEST(Fsdp1WrapTest, NothingIsWrappedWhereTheWholeModelIsSmall) {
  const Trace trace = LayeredTrace(3, 8, 8);
  Strategy strategy = Flat();
  strategy.fsdp1.size_based_wrap = SizeBasedWrap{.min_num_params = 1 << 30};
  EXPECT_THAT(UnitNames(Planned(trace, strategy)), ElementsAre(""));
}

TEST(Fsdp1WrapTest, EveryUnitHoldsTheMinimumAndContainersAreNone) {
  const Trace trace = LayeredTrace(3, 8, 8);
  Strategy strategy = Flat();
  for (std::int64_t minimum = 1; minimum <= 4 * Largest(trace); minimum += 7) {
    strategy.fsdp1.size_based_wrap = SizeBasedWrap{.min_num_params = minimum};
    for (const Unit& unit : Planned(trace, strategy).units) {
      if (unit.fqn.empty()) continue;  // the root is wrapped whatever it holds
      const auto module = std::ranges::find(trace.modules, unit.fqn, &Module::fqn);
      EXPECT_NE(module->class_name, "ModuleList");
      std::int64_t numel = 0;
      for (const UnitParameter& parameter : unit.parameters) {
        std::int64_t product = 1;
        for (const std::int64_t size : parameter.shape) product *= size;
        numel += product;
      }
      EXPECT_GE(numel, minimum) << unit.fqn;
    }
  }
}

TEST(Fsdp1WrapTest, NothingBelowALeafIsWrapped) {
  const Trace trace = LayeredTrace(2, 8, 8);
  Strategy strategy = Flat();
  strategy.fsdp1.size_based_wrap = SizeBasedWrap{.min_num_params = 1};
  EXPECT_GT(UnitNames(Planned(trace, strategy)).size(), 1U);
  strategy.fsdp1.size_based_wrap->force_leaf_modules = {trace.modules[0].class_name};
  EXPECT_THAT(UnitNames(Planned(trace, strategy)), ElementsAre(""));
  // The classes that mixed precision ignores are a second policy, which always looks further down.
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
  EXPECT_GT(UnitNames(Planned(trace, strategy)).size(), 1U);
}

TEST(Fsdp1WrapTest, IgnoredModulesAreNoUnitsAndTheirParametersAreInNone) {
  const Trace trace = LayeredTrace(3, 8, 8);
  Strategy strategy = Flat();
  const std::vector<std::string> all = UnitNames(Planned(trace, strategy));
  ASSERT_GE(all.size(), 2U);
  const std::string ignored = all[1];
  const auto module = std::ranges::find(trace.modules, ignored, &Module::fqn);
  strategy.units = {{.modules = {"class:" + module->class_name}}, {.modules = {""}}};
  strategy.fsdp1.ignored_modules = {ignored};
  const Plan plan = Planned(trace, strategy);
  EXPECT_THAT(UnitNames(plan), Not(Contains(ignored)));
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& p : unit.parameters) EXPECT_FALSE(p.fqn.starts_with(ignored + ".")) << p.fqn;
  }
}

TEST(Fsdp1WrapTest, EachUnitCommunicatesWithTheRanksOfItsOwnSharding) {
  Strategy strategy = Flat();
  strategy.mesh = {{"replicate", 2}, {"shard", 2}};
  strategy.fsdp1.sharding = Fsdp1Sharding::kNoShard;
  strategy.units = {{.modules = {"layers.0"}, .sharding = Fsdp1Sharding::kHybridShard},
                    {.modules = {"layers.1"}, .sharding = Fsdp1Sharding::kFullShard},
                    {.modules = {""}}};
  const Plan plan = Planned(LayeredTrace(2, 8, 8), strategy, 4);
  const auto ranks = [&](CommunicatorId id) {
    return id < 0 ? std::pair<std::int64_t, std::int64_t>{}
                  : std::pair{plan.communicators[id].size, plan.communicators[id].stride};
  };
  const auto groups = [&](const std::string& fqn) {
    const Unit& unit = *std::ranges::find(plan.units, fqn, &Unit::fqn);
    return std::pair{ranks(unit.shard_communicator), ranks(unit.replicate_communicator)};
  };
  const std::pair<std::int64_t, std::int64_t> none, all{4, 1};
  EXPECT_EQ(groups("layers.0"), std::pair(std::pair(std::int64_t{2}, std::int64_t{1}),
                                          std::pair(std::int64_t{2}, std::int64_t{2})));
  EXPECT_EQ(groups("layers.1"), std::pair(all, none));
  EXPECT_EQ(groups(""), std::pair(none, all));
  EXPECT_THAT(Verify(plan), IsEmpty());
}

// Hybrid sharding over one rank takes that rank for all: replicas drift apart.
TEST(Fsdp1WrapTest, HybridShardingOverOneRankAveragesOverItAlone) {
  Strategy strategy = Flat();
  strategy.mesh = {{"replicate", 2}, {"shard", 1}};
  strategy.fsdp1.sharding = Fsdp1Sharding::kHybridShard;
  const Result<PlannerOutput> planned = MakePlan(LayeredTrace(2, 8, 8), strategy, ClusterOf(2));
  ASSERT_TRUE(planned);
  for (const Instruction* reduce : Instructions(planned->plan, InstructionKind::kAllReduce)) {
    EXPECT_EQ(planned->plan.communicators[reduce->communicator].size, 1);
  }
  EXPECT_THAT(planned->faults, Contains(HasSubstr("one rank")));
}

TEST(Fsdp1Test, FactorsDivideBeforeAndAfterAndThePlanVerifies) {
  Strategy strategy = Flat();
  strategy.fsdp1.gradient_predivide_factor = 8;
  strategy.fsdp1.gradient_postdivide_factor = 1;
  const Plan plan = Planned(LayeredTrace(2, 8, 8), strategy, 4);
  for (const Instruction* scale : Instructions(plan, InstructionKind::kGradScale)) {
    EXPECT_EQ(scale->divisor, 8);
  }
  EXPECT_THAT(Verify(plan), IsEmpty());
}

TEST(Fsdp1Test, SummonFullParamsGathersWhatIsShardedInTheOriginalDType) {
  Strategy strategy = Flat();
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
  const ModuleCall enter{.method = "summon_full_params", .value = true};
  const ModuleCall leave{.method = "summon_full_params", .value = false};
  strategy.program = {
      {enter, leave, ForwardCall{0, 0}, BackwardCall{{0}, 0}, OptimizerStepCall{}, ZeroGradCall{}}};
  const Trace trace = LayeredTrace(2, 8, 8);
  const Plan plan = Planned(trace, strategy);
  std::size_t summoned = 0;
  for (const Instruction* gather : Instructions(plan, InstructionKind::kAllGather)) {
    if (gather->reason != "summon_full_params") continue;
    ++summoned;
    EXPECT_EQ(plan.buffers[gather->dst].dtype, plan.units[gather->unit].orig_dtype);
    EXPECT_EQ(gather->stream, 0);
  }
  EXPECT_EQ(summoned, static_cast<std::size_t>(std::ranges::count_if(
                          plan.units, [](const Unit& unit) { return !unit.parameters.empty(); })));
  EXPECT_THAT(Verify(plan), IsEmpty());
  strategy.program.front().erase(strategy.program.front().begin());
  EXPECT_FALSE(MakePlan(trace, strategy, ClusterOf(2)));
}

TEST(Fsdp1Test, WithoutShardingNoSyncAddsToWhatIsReducedAndThePlanSaysSo) {
  Strategy strategy = Flat();
  strategy.fsdp1.sharding = Fsdp1Sharding::kNoShard;
  const ModuleCall enter{.method = "no_sync", .value = true}, leave{.method = "no_sync", .value = false};
  strategy.program = {{ForwardCall{0, 0}, BackwardCall{{0}, 0}, enter, ForwardCall{1, 0},
                       BackwardCall{{1}, 0}, leave, OptimizerStepCall{}, ZeroGradCall{}}};
  const Result<PlannerOutput> planned = MakePlan(LayeredTrace(2, 8, 8), strategy, ClusterOf(2));
  ASSERT_TRUE(planned) << ToString(planned.error());
  EXPECT_THAT(planned->faults, Contains(HasSubstr("without sharding")));
}

TEST(Fsdp1Test, OrderIsCheckedInTheFirstStepOnly) {
  Strategy strategy = Flat();
  strategy.fsdp1.validate_execution_order = true;
  const Plan plan = Planned(LayeredTrace(2, 8, 8), strategy);
  ASSERT_GE(plan.steps.size(), 2U);
  std::vector<std::size_t> checks;
  for (const PlanStep& step : plan.steps) {
    std::size_t count = 0;
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        const bool gathers = i.kind == InstructionKind::kAllGather;
        count += gathers && plan.buffers[i.dst].role == BufferRole::kOrderCheck ? 1 : 0;
      }
    }
    checks.push_back(count);
  }
  std::size_t forwards = 0;
  for (const Trigger& trigger : plan.steps.front().triggers) {
    forwards += trigger.kind == TriggerKind::kPreForward && !plan.units[trigger.unit].parameters.empty();
  }
  EXPECT_EQ(checks.front(), 2 * forwards);
  for (std::size_t s = 1; s < checks.size(); ++s) EXPECT_EQ(checks[s], 0U);
}

}  // namespace
}  // namespace shardplan
