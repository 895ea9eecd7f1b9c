// SPDX-License-Identifier: Apache-2.0
// The optimising planner on small models: no plan that people or chance set is faster in the same budget, the
// certificate holds, and a changed one does not.
#include "shardplan/planner/optimize.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using testing::kLoose;
using testing::Random;

constexpr std::int64_t kRanks = 4;

// Blocks of two modules between an embedding and a head.
Trace SmallModel(int layers, std::int64_t rows, std::int64_t columns) {
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < layers; ++i) {
    list.children.push_back({.name = std::to_string(i),
                             .class_name = "Block",
                             .children = {{.name = "attn", .parameters = {{rows, columns}}},
                                          {.name = "mlp", .parameters = {{2 * rows, columns}, {columns}}}}});
  }
  return testing::TraceOf({.name = "",
                           .children = {{.name = "embed", .parameters = {{rows, columns}}},
                                        list,
                                        {.name = "head", .parameters = {{rows, columns}}}}},
                          1'000'000);
}

Cluster SmallCluster(std::int64_t link_bytes_per_second = 4'000'000'000) {
  return testing::BalancedCluster(kRanks, 2, link_bytes_per_second);
}

OptimizeOptions Within(Bytes budget, std::int32_t threads = 2) {
  return {.budget = budget, .may_change_policy = true, .time_limit_ns = {0}, .threads = threads};
}

TEST(Optimize, NothingThatPeopleSetIsFaster) {
  const Trace trace = SmallModel(4, 64, 32);
  for (const std::int64_t speed : {100'000'000LL, 1'000'000'000LL, 20'000'000'000LL}) {
    const Cluster cluster = SmallCluster(speed);
    const Result<OptimizeOutput> output = Optimize(trace, {}, cluster, Within(kLoose));
    ASSERT_TRUE(output.has_value()) << ToString(output.error());
    EXPECT_TRUE(Verify(output->plan).empty());
    EXPECT_TRUE(output->report.complete);
    ASSERT_TRUE(output->certificate.has_value()) << output->report.notes.front();
    EXPECT_LE(output->report.lower_bound_ns, output->report.step_ns);
    const Status checked = CheckCertificate(trace, output->plan, *output->certificate);
    EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
    // Not by the search's own lists: every knob of both policies by hand.
    const OptimizeOptions options = Within(kLoose);
    const optimize::Job job = optimize::MakeJob(trace, {}, kRanks);
    optimize::Evaluator evaluator(trace, job, cluster, options);
    for (const std::string policy : {"fsdp2", "fsdp1"}) {
      for (const bool reshard : {false, true}) {
        for (int prefetch = 0; prefetch <= 3; ++prefetch) {
          Strategy strategy{.policy = policy};
          strategy.reshard_after_forward = reshard;
          if (policy == "fsdp1") strategy.reshard_after_forward.reset();
          strategy.fsdp1.sharding = reshard ? Fsdp1Sharding::kFullShard : Fsdp1Sharding::kShardGradOp;
          strategy.fsdp1.forward_prefetch = prefetch % 2 == 1;
          strategy.fsdp1.backward_prefetch = static_cast<Fsdp1BackwardPrefetch>(prefetch % 3);
          strategy.fsdp2.forward_prefetch = prefetch;
          strategy.fsdp2.separate_reduce_scatter_communicator = prefetch > 1;
          const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
          ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
          const auto measured = optimize::Measure(planned->plan);
          ASSERT_TRUE(measured.has_value());
          EXPECT_LE(output->report.step_ns, measured->step_ns) << policy << " " << reshard << " " << prefetch;
        }
      }
    }
  }
}

// The strategy's plan takes no less than the bound without a budget. If it is within the budget of `found`,
// which `within` counts, it takes no less than that one's bound, and hardly less than what was found.
void ExpectNotFaster(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                     const Optimization& loose, const Optimization& found, int& within) {
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
  ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
  const auto measured = optimize::Measure(planned->plan);
  ASSERT_TRUE(measured.has_value());
  EXPECT_LE(loose.lower_bound_ns, measured->step_ns);
  if (*ReservedWithoutBudget(planned->plan, {}) > found.budget_bytes) return;
  ++within;
  EXPECT_LE(found.lower_bound_ns, measured->step_ns);
  EXPECT_LE(found.step_ns.value, measured->step_ns.value * 101 / 100);
}

TEST(Optimize, IsWithinTheBudgetAndNoSlowerThanRandomStrategies) {
  // So large that the allocator's segments do not decide.
  const Trace trace = SmallModel(4, 4096, 4096);
  const Cluster cluster = SmallCluster(1'000'000'000);
  const Result<OptimizeOutput> loose = Optimize(trace, {}, cluster, Within(kLoose));
  ASSERT_TRUE(loose.has_value());
  Random random(17);
  const optimize::Job job = optimize::MakeJob(trace, {}, kRanks);
  for (const int part : {95, 85, 75}) {
    const Bytes budget{loose->report.peak_reserved_bytes.value * part / 100};
    const Result<OptimizeOutput> output = Optimize(trace, {}, cluster, Within(budget));
    ASSERT_TRUE(output.has_value()) << "part " << part << ": " << ToString(output.error());
    EXPECT_LE(output->report.peak_pooled_bytes, budget);
    EXPECT_LE(output->report.peak_reserved_bytes, budget);
    EXPECT_EQ(PoolMemory(output->plan).pooled_bytes, output->report.peak_pooled_bytes);
    EXPECT_GE(output->report.step_ns, output->report.lower_bound_ns);
    EXPECT_EQ(output->report.budget_bytes, budget);
    int within = 0;
    for (int i = 0; i < 60; ++i) {
      SCOPED_TRACE(::testing::Message() << "part " << part << ", choice " << i);
      optimize::Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1 + random.Below(3),
                                                               static_cast<optimize::Ends>(random.Below(3)))};
      choice.kept = random.Below(5);
      choice.part = random.Chance(30) ? 2 : 0;
      choice.prefetch = random.Below(3);
      choice.in_flight = 1 + random.Below(2);
      choice.own_communicator = random.Chance(50);
      ExpectNotFaster(trace, optimize::StrategyOf(job, choice), cluster, loose->report, output->report,
                      within);
    }
    EXPECT_GT(within, 0) << "part " << part;
  }
}

// With micro-batches on a slow network: what waits and what is kept share the budget.
TEST(Optimize, IsNoSlowerThanRandomStrategiesWithMicrobatches) {
  const Trace trace = SmallModel(6, 2048, 1024);
  const Cluster cluster = SmallCluster(20'000'000);
  Strategy strategy;
  strategy.program = {testing::MicrobatchStep(4)};
  const optimize::Job job = optimize::MakeJob(trace, strategy, kRanks);
  const Result<OptimizeOutput> loose = Optimize(trace, strategy, cluster, Within(kLoose));
  ASSERT_TRUE(loose.has_value());
  Random random(23);
  for (const int part : {90, 75, 60}) {
    const Bytes budget{loose->report.peak_reserved_bytes.value * part / 100};
    const Result<OptimizeOutput> output = Optimize(trace, strategy, cluster, Within(budget));
    ASSERT_TRUE(output.has_value()) << "part " << part << ": " << ToString(output.error());
    EXPECT_LE(output->report.peak_reserved_bytes, budget);
    EXPECT_EQ(output->report.budget_bytes, budget);
    int within = 0;
    for (int i = 0; i < 80; ++i) {
      SCOPED_TRACE(::testing::Message() << "part " << part << ", choice " << i);
      optimize::Choice choice{
          .units = optimize::UnitsOfBlocks(job.chain, 1 + random.Below(2), optimize::Ends::kOwn)};
      const auto units = static_cast<std::int32_t>(choice.units.size());
      choice.part = random.Chance(60) ? 2 : 0;
      choice.kept = random.Chance(50) ? 0 : random.Below(units);
      choice.post_forward_units = random.Below(units + 1);
      choice.inner = random.Chance(60) ? 2 : 0;
      choice.accumulation = static_cast<optimize::Accumulation>(random.Below(6));
      choice.accumulated = random.Chance(50) ? 0 : random.Below(units);
      choice.outer_reduced_last = random.Below(units + 1);
      choice = optimize::Effective(job, choice);
      ExpectNotFaster(trace, optimize::StrategyOf(job, choice), cluster, loose->report, output->report,
                      within);
    }
    EXPECT_GT(within, 0) << "part " << part;
  }
}

// Counts in the step that repeats how often units are gathered over all ranks, and over a part of them.
std::pair<int, int> GathersOf(const Plan& plan) {
  std::pair<int, int> gathers;
  for (const Trigger& trigger : plan.steps.back().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind != InstructionKind::kAllGather) continue;
      const bool all = plan.communicators[static_cast<std::size_t>(i.communicator)].size == kRanks;
      ++(all ? gathers.first : gathers.second);
    }
  }
  return gathers;
}

TEST(Optimize, KeepsPartsOverMicrobatchesWhereGathersOverAllRanksAreDear) {
  const Trace trace = SmallModel(4, 64, 32);
  const Cluster cluster = SmallCluster(20'000'000);
  Strategy strategy;
  strategy.program = {testing::MicrobatchStep(4)};
  const optimize::Job job = optimize::MakeJob(trace, strategy, kRanks);
  optimize::Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn), .part = 2};
  choice.accumulation = optimize::Accumulation::kEachKept;
  EXPECT_FALSE(optimize::IsOfPyTorch(choice));
  const Result<PlannerOutput> parts = MakePlan(trace, optimize::StrategyOf(job, choice), cluster);
  ASSERT_TRUE(parts.has_value()) << ToString(parts.error());
  // Each unit once over all ranks; over the parts in every other pass.
  const int units = static_cast<int>(choice.units.size());
  EXPECT_EQ(GathersOf(parts->plan), std::pair(units, 7 * units));
  choice.accumulation = optimize::Accumulation::kEach;
  EXPECT_TRUE(optimize::IsOfPyTorch(choice));
  const Result<PlannerOutput> freed = MakePlan(trace, optimize::StrategyOf(job, choice), cluster);
  ASSERT_TRUE(freed.has_value());
  EXPECT_EQ(GathersOf(freed->plan), std::pair(4 * units, 4 * units));
  // Nothing is kept whole within this budget, and parts are: the search keeps them.
  const auto measured = optimize::Measure(parts->plan);
  ASSERT_TRUE(measured.has_value());
  const Bytes budget = *ReservedWithoutBudget(parts->plan, {});
  const Result<OptimizeOutput> output = Optimize(trace, strategy, cluster, Within(budget));
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  EXPECT_LE(output->report.step_ns, measured->step_ns);
  ASSERT_TRUE(output->certificate.has_value());
  const Status checked = CheckCertificate(trace, output->plan, *output->certificate);
  EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
}

// Two experts in a tensor: by rows four ranks hold twice as much as there is.
TEST(Optimize, CutsParametersOfFewRowsAlongAnotherDimension) {
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < 3; ++i) {
    list.children.push_back({.name = std::to_string(i),
                             .class_name = "Block",
                             .children = {{.name = "experts", .parameters = {{2, 2048, 2048}}},
                                          {.name = "norm", .parameters = {{64}}}}});
  }
  const Trace trace = testing::TraceOf({.name = "", .children = {list}}, 1'000'000);
  const optimize::Job job = optimize::MakeJob(trace, {}, kRanks);
  ASSERT_EQ(job.divisible_dims.size(), 3U);
  EXPECT_EQ(job.divisible_dims.front(), (ShardDimRule{{"layers.0.experts.weight0"}, 1}));
  const Result<OptimizeOutput> loose = Optimize(trace, {}, SmallCluster(), Within(kLoose));
  ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
  OptimizeOptions fixed = Within(kLoose);
  fixed.may_change_policy = false;
  fixed.fixed = {"layout"};
  const Result<OptimizeOutput> by_rows = Optimize(trace, {}, SmallCluster(), fixed);
  ASSERT_TRUE(by_rows.has_value());
  EXPECT_LE(loose->report.step_ns, by_rows->report.step_ns);
  // In less than any plan by rows needs, which pools no less than the most frugal of them.
  std::vector<optimize::Choice> frugal = optimize::Frugal(job, fixed);
  std::erase_if(frugal, [](const optimize::Choice& choice) { return choice.in_parts; });
  ASSERT_EQ(frugal.size(), 2U);
  ASSERT_TRUE(!frugal.front().cuts_divisible_dims && frugal.back().cuts_divisible_dims);
  const Result<PlannerOutput> rows =
      MakePlan(trace, optimize::StrategyOf(job, frugal.front()), SmallCluster());
  const Result<PlannerOutput> cut = MakePlan(trace, optimize::StrategyOf(job, frugal.back()), SmallCluster());
  ASSERT_TRUE(rows.has_value() && cut.has_value());
  OptimizeOptions tight = Within(*ReservedWithoutBudget(cut->plan, {}));
  ASSERT_LT(tight.budget, PoolMemory(rows->plan).pooled_bytes);
  tight.may_change_policy = false;
  const Result<OptimizeOutput> divisible = Optimize(trace, {}, SmallCluster(), tight);
  ASSERT_TRUE(divisible.has_value()) << ToString(divisible.error());
  EXPECT_EQ(divisible->strategy.fsdp2.shard_dims, job.divisible_dims);
  ASSERT_TRUE(divisible->certificate.has_value());
  const Status checked = CheckCertificate(trace, divisible->plan, *divisible->certificate);
  EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
  tight.fixed.insert("layout");
  EXPECT_FALSE(Optimize(trace, {}, SmallCluster(), tight).has_value());
}

// A model whose blocks are two large matrices, and a little more.
Trace ModelOfLargeBlocks() {
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < 3; ++i) {
    list.children.push_back({.name = std::to_string(i),
                             .class_name = "Block",
                             .children = {{.name = "up", .parameters = {{2048, 2048}}},
                                          {.name = "down", .parameters = {{2048, 2048}}},
                                          {.name = "norm", .parameters = {{64}}}}});
  }
  return testing::TraceOf({.name = "", .children = {list}}, 1'000'000);
}

TEST(Optimize, CutsBlocksIntoUnitsWhereNothingElseFits) {
  const Trace trace = ModelOfLargeBlocks();
  const optimize::Job job = optimize::MakeJob(trace, {}, kRanks);
  EXPECT_EQ(job.chain.parts, (std::vector<std::string>{"up", "down"}));
  OptimizeOptions options = Within(kLoose);
  options.may_change_policy = false;
  const std::vector<optimize::Choice> frugal = optimize::Frugal(job, options);
  ASSERT_EQ(frugal.size(), 2U);
  ASSERT_TRUE(!frugal.front().in_parts && frugal.back().in_parts);
  const Result<PlannerOutput> whole =
      MakePlan(trace, optimize::StrategyOf(job, frugal.front()), SmallCluster());
  const Result<PlannerOutput> parts =
      MakePlan(trace, optimize::StrategyOf(job, frugal.back()), SmallCluster());
  ASSERT_TRUE(whole.has_value() && parts.has_value());
  options.budget = *ReservedWithoutBudget(parts->plan, {});
  ASSERT_LT(options.budget, PoolMemory(whole->plan).pooled_bytes);
  const Result<OptimizeOutput> found = Optimize(trace, {}, SmallCluster(), options);
  ASSERT_TRUE(found.has_value()) << ToString(found.error());
  EXPECT_LE(found->report.peak_reserved_bytes, options.budget);
  EXPECT_TRUE(std::ranges::any_of(found->strategy.units, [](const UnitRule& rule) {
    return rule.modules == std::vector<std::string>{"layers.1.up"};
  }));
  ASSERT_TRUE(found->certificate.has_value());
  const Status checked = CheckCertificate(trace, found->plan, *found->certificate);
  EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
  options.fixed = {"units"};
  EXPECT_FALSE(Optimize(trace, {}, SmallCluster(), options).has_value());
}

TEST(Optimize, HandlesPartsOfABlockAsItsUnit) {
  Strategy strategy;
  strategy.program = {{ForwardCall{0, 0}, BackwardCall{{0}, 0}, ForwardCall{1, 0}, BackwardCall{{1}, 0},
                       OptimizerStepCall{}, ZeroGradCall{}}};
  const optimize::Job job = optimize::MakeJob(ModelOfLargeBlocks(), strategy, kRanks);
  const Strategy made =
      optimize::StrategyOf(job, {.units = {1, 1, 1}, .in_parts = true, .kept = 2, .accumulated = 1});
  std::vector<std::string> units, waiting;
  for (const UnitRule& rule : made.units) {
    units.push_back(rule.modules.front());
    const bool of_first = rule.modules.front().starts_with("layers.0");
    if (rule.modules.front().empty()) continue;
    EXPECT_EQ(rule.reshard_after_forward, ReshardAfterForward(of_first)) << rule.modules.front();
  }
  EXPECT_EQ(units, (std::vector<std::string>{"layers.0.up", "layers.0.down", "layers.0", "layers.1.up",
                                             "layers.1.down", "layers.1", "layers.2.up", "layers.2.down",
                                             "layers.2", ""}));
  for (const ProgramCall& call : made.program.front()) {
    const auto* set = std::get_if<ModuleCall>(&call);
    if (set != nullptr && set->value == false) waiting.push_back(set->module);
  }
  EXPECT_EQ(waiting, (std::vector<std::string>{"layers.2.up", "layers.2.down", "layers.2"}));
}

TEST(Optimize, IsTheSameOnAnyNumberOfThreads) {
  const Trace trace = SmallModel(3, 32, 32);
  const Result<OptimizeOutput> one = Optimize(trace, {}, SmallCluster(), Within(kLoose, 1));
  const Result<OptimizeOutput> three = Optimize(trace, {}, SmallCluster(), Within(kLoose, 3));
  ASSERT_TRUE(one.has_value() && three.has_value());
  EXPECT_EQ(ToJson(one->plan), ToJson(three->plan));
  EXPECT_EQ(ToJson(*one->certificate), ToJson(*three->certificate));
  EXPECT_EQ(one->report.evaluations, three->report.evaluations);
}

TEST(Optimize, SaysWhatIsMissing) {
  const Trace trace = SmallModel(3, 64, 64);
  const Result<OptimizeOutput> output = Optimize(trace, {}, SmallCluster(), Within(Bytes{4096}));
  ASSERT_FALSE(output.has_value());
  EXPECT_EQ(output.error().code, ErrorCode::kNegative);
  EXPECT_NE(output.error().message.find("the least budget of one is"), std::string::npos)
      << output.error().message;
  EXPECT_NE(output.error().message.find("none of the class"), std::string::npos) << output.error().message;
  EXPECT_NE(output.error().message.find("--allow checkpoint"), std::string::npos) << output.error().message;
  EXPECT_NE(output.error().message.find("--alloc-conf expandable_segments:True"), std::string::npos)
      << output.error().message;
}

TEST(Optimize, LeavesWhatIsFixed) {
  const Trace trace = SmallModel(3, 32, 32);
  Strategy strategy;
  strategy.units = {{.modules = {"layers.*"}}, {.modules = {""}}};
  strategy.reshard_after_forward = true;
  OptimizeOptions options = Within(kLoose);
  options.may_change_policy = false;
  options.fixed = {"units", "reshard"};
  const Result<OptimizeOutput> output = Optimize(trace, strategy, SmallCluster(), options);
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  EXPECT_EQ(output->strategy.units, strategy.units);
  EXPECT_EQ(output->strategy.reshard_after_forward, strategy.reshard_after_forward);
  EXPECT_EQ(output->plan.policy, "fsdp2");
}

TEST(Optimize, StopsWhenItIsTold) {
  std::atomic<bool> stop = true;
  OptimizeOptions options = Within(kLoose);
  options.stop = &stop;
  const Result<OptimizeOutput> output = Optimize(SmallModel(3, 32, 32), {}, SmallCluster(), options);
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  EXPECT_FALSE(output->report.complete);
  EXPECT_TRUE(Verify(output->plan).empty());
}

TEST(Optimize, AccumulationReducesOnceWhereThatPays) {
  const Trace trace = SmallModel(4, 64, 64);
  Strategy strategy;
  strategy.program = {testing::MicrobatchStep(4)};
  const Result<OptimizeOutput> output = Optimize(trace, strategy, SmallCluster(50'000'000), Within(kLoose));
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  const auto each = optimize::Measure(MakePlan(trace, strategy, SmallCluster(50'000'000))->plan);
  ASSERT_TRUE(each.has_value());
  EXPECT_LT(output->report.step_ns.value * 2, each->step_ns.value);
  const Status checked = CheckCertificate(trace, output->plan, *output->certificate);
  EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
}

class ChangedCertificates : public ::testing::Test {
 protected:
  void SetUp() override {
    trace_ = SmallModel(3, 64, 32);
    Result<OptimizeOutput> output = Optimize(trace_, {}, SmallCluster(), Within(kLoose));
    ASSERT_TRUE(output.has_value() && output->certificate.has_value());
    plan_ = std::move(output->plan);
    good_ = std::move(*output->certificate);
    ASSERT_TRUE(CheckCertificate(trace_, plan_, good_).has_value());
  }
  template <typename Change>
  void ExpectRefused(const char* what, Change change) {
    Certificate changed = good_;
    change(changed);
    EXPECT_FALSE(CheckCertificate(trace_, plan_, changed).has_value()) << what;
  }

  Trace trace_;
  Plan plan_;
  Certificate good_;
};

TEST_F(ChangedCertificates, AreRefused) {
  ExpectRefused("a raised bound", [](Certificate& c) { c.lower_bound_ns.value += 1; });
  ExpectRefused("a raised bound of a branch",
                [](Certificate& c) { c.branches[0].lower_bound_ns.value += 1; });
  ExpectRefused("a shorter step", [](Certificate& c) { c.step_ns.value -= 1; });
  ExpectRefused("less memory", [](Certificate& c) { c.peak_pooled_bytes.value -= 512; });
  ExpectRefused("a budget below the plan",
                [](Certificate& c) { c.budget_bytes = c.peak_pooled_bytes - Bytes{1}; });
  ExpectRefused("a dropped branch", [](Certificate& c) { c.branches.pop_back(); });
  ExpectRefused("no branch", [](Certificate& c) { c.branches.clear(), c.layouts.clear(); });
  ExpectRefused("another plan", [](Certificate& c) { c.plan_digest.back() ^= 1; });
  ExpectRefused("another class", [](Certificate& c) { c.plan_class += "x"; });
  ExpectRefused("a window too few", [](Certificate& c) { c.branches[0].windows.pop_back(); });
  ExpectRefused("a cut too few", [](Certificate& c) { c.cuts.pop_back(); });
  for (std::size_t b = 0; b < good_.branches.size(); ++b) {
    for (std::size_t w = 0; w < good_.branches[b].windows.size(); ++w) {
      ExpectRefused("a raised price of kernels",
                    [&](Certificate& c) { c.branches[b].windows[w].kernels += kPriceScale / 4; });
      ExpectRefused("a raised price of links", [&](Certificate& c) {
        for (std::int64_t& price : c.branches[b].windows[w].links) price += kPriceScale / 2;
      });
    }
  }
}

TEST_F(ChangedCertificates, AreRefusedWithAnotherPlan) {
  Plan changed = plan_;
  changed.cluster.device.memory_bytes_per_second *= 2;
  EXPECT_FALSE(CheckCertificate(trace_, changed, good_).has_value());
  Trace other = SmallModel(3, 64, 64);
  const Status checked = CheckCertificate(other, plan_, good_);
  ASSERT_FALSE(checked.has_value());
  EXPECT_EQ(checked.error().code, ErrorCode::kBadInput);
}

TEST_F(ChangedCertificates, AreReadAsTheyWereWritten) {
  const Result<Certificate> read = ParseCertificate(ToJson(good_));
  ASSERT_TRUE(read.has_value()) << ToString(read.error());
  EXPECT_EQ(*read, good_);
}

}  // namespace
}  // namespace shardplan
