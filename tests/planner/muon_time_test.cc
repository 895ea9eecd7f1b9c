// SPDX-License-Identifier: Apache-2.0
// Muon: how long a plan's step takes, and what the optimising planner makes of it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "bound/muon_work.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/reserved_memory.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/bound_cases.h"
#include "tests/planner/muon_model.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::AddMuon;
using testing::BalancedOf;
using testing::ByOwners;
using testing::MuonModel;
using testing::MuonPlanOf;
using testing::MuonStepTime;
using testing::WithMuon;

// The rank that stands for all is as it is among all of them.
TEST(MuonTime, OfTheBusiestOwnerIsThatAmongAllRanks) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto shards = static_cast<std::int64_t>(2 + random() % 4),
               replicas = static_cast<std::int64_t>(1 + random() % 2);
    Trace trace =
        MuonModel(1 + static_cast<int>(random() % 4), 16 * static_cast<std::int64_t>(1 + random() % 5));
    AddMuon(trace, {});
    Strategy strategy = ByOwners(random() % 2 == 0);
    if (random() % 2 == 0) strategy.optimizer.muon->buckets = {{"layers.0.*.*"}, {"layers.1.*.*"}};
    if (strategy.optimizer.muon->buckets.size() > 1 && trace.parameters.size() < 7)
      strategy.optimizer.muon->buckets = {};
    // Two groups of ranks with work of their own.
    const bool two_groups = replicas > 1 && random() % 2 == 0;
    if (two_groups)
      strategy.optimizer.muon->compute = {{.parameters = {"layers.*.up.*"}, .over_replicas = true}, {}};
    strategy.mesh = {{"replicate", replicas}, {"shard", shards}};
    const Plan plan = MuonPlanOf(trace, strategy, shards * replicas);
    ASSERT_FALSE(plan.steps.empty());
    const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
    ASSERT_TRUE(program.has_value());
    const Result<RanksApart> apart = RunRanksApart(plan, *program, {});
    ASSERT_TRUE(apart.has_value()) << ToString(apart.error());
    EXPECT_EQ(MuonStepTime(plan), apart->ranks[static_cast<std::size_t>(program->rank)].end_ns);
    EXPECT_LE(MuonStepTime(plan), apart->step_ns);
    // A rank owns what its place in each group owns: shards follow one another, so do all ranks.
    std::int64_t matrices = 0, owners = 0;
    for (std::int64_t rank = 0; rank < shards * replicas; ++rank) {
      std::int64_t own = 0;
      for (const Exchange& exchange : plan.exchanges) {
        const std::int64_t place = rank % plan.communicators[exchange.communicator].size;
        own += std::ranges::count(exchange.matrices, place, &ExchangedMatrix::owner);
      }
      matrices += own;
      owners += own > 0 ? 1 : 0;
    }
    const OwnedTimes times = TimesOfOwners(*program, program->steps.back());
    EXPECT_EQ(times.matrices, matrices);
    EXPECT_EQ(times.owners, owners);
    EXPECT_EQ(times.ranks, shards * replicas);
    EXPECT_GE(times.most_ns.value * times.ranks, times.in_all_ns.value);
  }
}

// Two ranks own a matrix each, of which one takes three times as long: the step is the slower owner's.
TEST(MuonTime, IsThatOfTheSlowestOwner) {
  Trace trace = MuonModel(1);
  AddMuon(trace, {});
  Strategy strategy = ByOwners();
  const Nanoseconds apart = MuonStepTime(MuonPlanOf(trace, strategy));
  strategy.optimizer.muon->compute[0].owner = 0;
  const Nanoseconds together = MuonStepTime(MuonPlanOf(trace, strategy));
  EXPECT_GT(together, apart);
}

// Every rank has the work of all owners, whatever their number.
TEST(MuonTime, OnAllRanksHasEveryMatrixOnEach) {
  Trace trace = MuonModel(4);
  AddMuon(trace, {});
  for (const std::int64_t ranks : {2, 4}) {
    Strategy strategy = WithMuon({.compute = {{.compute = MatrixCompute::kReplicated}}});
    const auto work_of = [&](const Strategy& of) {
      const Plan plan = MuonPlanOf(trace, of, ranks);
      const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
      EXPECT_TRUE(program.has_value());
      const Result<RanksApart> apart = RunRanksApart(plan, *program, {});
      EXPECT_TRUE(apart.has_value());
      std::set<std::int64_t> ends;
      for (const RankTimes& rank : apart->ranks) ends.insert(rank.end_ns.value);
      return std::pair(MuonStepTime(plan), ends.size());
    };
    const auto [on_all, different] = work_of(strategy);
    EXPECT_EQ(different, 1) << "all ranks do the same";
    EXPECT_GT(on_all, work_of(ByOwners()).first);
  }
}

// The issue of the operators of the optimizer's step: the host's time, or where it runs the kernels a part of
// theirs.
std::set<std::int64_t> IssuesOf(const Strategy& strategy, const Trace& trace, bool runs_kernels) {
  constexpr std::int64_t kOfModel = 1'000, kOfOptimizer = 8'000;
  const auto lowered = [&](std::int64_t of_optimizer) {
    Plan plan = MuonPlanOf(trace, strategy);
    plan.cluster.host.operator_issue_ns = {kOfModel};
    plan.cluster.host.optimizer_issue_ns = {of_optimizer};
    plan.cluster.host.runs_kernels = runs_kernels;
    Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
    EXPECT_TRUE(program.has_value()) << ToString(program.error());
    return std::pair(std::move(plan), std::move(*program));
  };
  const auto [plan, program] = lowered(kOfOptimizer);
  const EngineProgram as_model = lowered(kOfModel).second;
  std::set<std::int64_t> found;
  for (const EngineInstruction& instruction : program.steps.back().code) {
    if (instruction.op != EngineOp::kSegment) continue;
    const EngineSegment& segment = program.segments[instruction.operand];
    if (plan.segments[segment.of].phase != SegmentPhase::kOptimizer) continue;
    for (std::int32_t k = segment.first; k < segment.first + segment.count; ++k) {
      const Nanoseconds more = program.operators[k].duration_ns - as_model.operators[k].duration_ns;
      found.insert(runs_kernels ? kOfModel + more.value : instruction.host_ns.value);
      EXPECT_TRUE(runs_kernels || more.value == 0);
    }
  }
  return found;
}

// torch's step passes each operator through DTensor, an owner has a plain matrix.
TEST(MuonTime, OperatorsOnShardedParametersAreIssuedAsTheOptimizers) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {{2, 1}});
  for (const bool runs_kernels : {false, true}) {
    EXPECT_EQ(IssuesOf(WithMuon(), trace, runs_kernels), std::set<std::int64_t>{8'000});
    EXPECT_EQ(IssuesOf(ByOwners(), trace, runs_kernels), std::set<std::int64_t>{1'000});
  }
}

// ---- the optimising planner ----

TEST(MuonOptimize, IsNeverSlowerThanAnyWayAndItsBoundHolds) {
  for (const auto& [replicas, in_backward] :
       std::vector<std::pair<std::int64_t, bool>>{{1, false}, {2, false}, {1, true}}) {
    SCOPED_TRACE(fmt::format("{} replicas{}", replicas, in_backward ? ", exchanged in the backward" : ""));
    Trace trace = MuonModel(3);
    AddMuon(trace, {{4 / replicas, replicas}});
    Strategy strategy = WithMuon({.begin_in_backward = in_backward});
    strategy.mesh = {{"replicate", replicas}, {"shard", 4 / replicas}};
    const Cluster cluster = BalancedOf(4);
    const Result<OptimizeOutput> output =
        Optimize(trace, strategy, cluster, {.budget = testing::kLoose, .time_limit_ns = {0}, .threads = 2});
    ASSERT_TRUE(output.has_value()) << ToString(output.error());
    EXPECT_TRUE(Verify(output->plan).empty());
    const Nanoseconds found = MuonStepTime(output->plan);
    EXPECT_GE(found, output->report.lower_bound_ns);
    Muon all_on_one{.compute = {{.owner = 0}}};
    Muon dist_muon{.compute = {{}}, .buckets = {{"layers.0.*.*"}, {"layers.1.*.*"}}, .dist_muon = true};
    const Muon under_backward{
        .compute = {{}}, .buckets = dist_muon.buckets, .begin_in_backward = in_backward};
    const Muon on_all{.compute = {{.compute = MatrixCompute::kReplicated}}};
    Muon on_all_by_block = on_all;
    on_all_by_block.buckets = dist_muon.buckets;
    for (const Muon& muon : {Muon{}, all_on_one, dist_muon, on_all, on_all_by_block, under_backward}) {
      Strategy other = strategy;
      other.optimizer.muon = muon;
      const Result<PlannerOutput> planned = MakePlan(trace, other, cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      EXPECT_LE(found, MuonStepTime(planned->plan));
    }
    const auto owners = std::ranges::find(output->report.decisions, "owners", &DecisionReport::decision);
    ASSERT_NE(owners, output->report.decisions.end());
    EXPECT_NE(owners->chosen, "torch.optim.Muon on shards");
    ASSERT_TRUE(output->certificate.has_value())
        << (output->report.notes.empty() ? "" : output->report.notes.front());
    const Status checked = CheckCertificate(trace, output->plan, *output->certificate);
    EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
  }
}

// Flags say where the search begins, and bind where they are fixed.
TEST(MuonOptimize, OwnersThatAreGivenBindWhereTheyAreFixed) {
  Trace trace = MuonModel(3);
  AddMuon(trace, {{4, 1}});
  const auto found = [&](const Strategy& strategy, const std::set<std::string>& fixed) {
    const Result<OptimizeOutput> output =
        Optimize(trace, strategy, BalancedOf(4),
                 {.budget = testing::kLoose, .fixed = fixed, .time_limit_ns = {0}, .threads = 2});
    EXPECT_TRUE(output.has_value()) << ToString(output.error());
    return *output;
  };
  const Nanoseconds free = found(WithMuon(), {}).report.step_ns;
  const Strategy on_all =
      WithMuon({.compute = {{.compute = MatrixCompute::kReplicated}}, .buckets = {{"layers.0.*.*"}}});
  EXPECT_EQ(found(on_all, {}).report.step_ns, free);
  const OptimizeOutput fixed = found(on_all, {"owners"});
  EXPECT_GT(fixed.report.step_ns, free);
  EXPECT_EQ(fixed.strategy.optimizer.muon->compute, on_all.optimizer.muon->compute);
  EXPECT_EQ(fixed.strategy.optimizer.muon->buckets, on_all.optimizer.muon->buckets);
  Strategy by_number = ByOwners();
  by_number.optimizer.muon->compute[0].owner = 1;
  EXPECT_EQ(found(by_number, {}).strategy.optimizer.muon->compute, by_number.optimizer.muon->compute);
}

// The budget is what the way itself reserves, and the search ends after so many plans.
TEST(MuonOptimize, NoWayIsFasterInItsBudgetWhereverTheSearchEnds) {
  Trace trace = MuonModel(3);
  AddMuon(trace, {{4, 1}});
  const Cluster cluster = BalancedOf(4);
  const std::vector<std::vector<std::string>> by_block = {{"layers.0.*.*"}, {"layers.1.*.*"}};
  const std::map<std::string, Muon> ways = {
      {"torch.optim.Muon", {}},
      {"DistMuon", {.compute = {{}}, .buckets = by_block, .dist_muon = true}},
      {"owners", {.compute = {{}}}},
      {"every rank all", {.compute = {{.compute = MatrixCompute::kReplicated}}}},
  };
  for (const auto& [name, muon] : ways) {
    const Plan plan = MuonPlanOf(trace, WithMuon(muon), 4);
    const Result<Bytes> reserved = ReservedWithoutBudget(plan, {});
    ASSERT_TRUE(reserved.has_value());
    for (const std::int64_t limit : {1, 20}) {
      SCOPED_TRACE(fmt::format("{}, {} bytes, {} plans", name, reserved->value, limit));
      const Result<OptimizeOutput> output =
          Optimize(trace, WithMuon(), cluster,
                   {.budget = *reserved, .plan_limit = limit, .time_limit_ns = {0}, .threads = 2});
      ASSERT_TRUE(output.has_value()) << ToString(output.error());
      EXPECT_LE(output->report.step_ns, MuonStepTime(plan));
      EXPECT_LE(output->report.peak_reserved_bytes, *reserved);
    }
  }
}

// Four ranks whose exchanges take a second, whatever their size, and whose gathers are fast.
TEST(MuonOptimize, GathersOnAllRanksWhereExchangesAreSlow) {
  Trace trace = MuonModel(3);
  AddMuon(trace, {});
  Cluster cluster = testing::BalancedCluster(4, 4, 4'000'000'000);
  const Nanoseconds second{1'000'000'000};
  cluster.collectives = {{.kind = CollectiveKind::kAllToAll,
                          .ranks = 4,
                          .link = cluster.links.front().name,
                          .points = {{Bytes{1}, second}, {Bytes{1 << 30}, second}}}};
  const OptimizeOptions options{.budget = testing::kLoose, .time_limit_ns = {0}, .threads = 2};
  const Result<OptimizeOutput> output = Optimize(trace, WithMuon(), cluster, options);
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  const auto owners = std::ranges::find(output->report.decisions, "owners", &DecisionReport::decision);
  ASSERT_NE(owners, output->report.decisions.end());
  EXPECT_TRUE(owners->chosen.starts_with("every matrix on every rank")) << owners->chosen;
  EXPECT_LT(MuonStepTime(output->plan), second);
  EXPECT_GE(MuonStepTime(output->plan), output->report.lower_bound_ns);
  // Owners of the strategy are kept.
  OptimizeOptions fixed = options;
  fixed.fixed = {"owners"};
  for (const MatrixCompute compute : {MatrixCompute::kOwned, MatrixCompute::kReplicated}) {
    const Result<OptimizeOutput> kept =
        Optimize(trace, WithMuon({.compute = {{.compute = compute}}}), cluster, fixed);
    ASSERT_TRUE(kept.has_value()) << ToString(kept.error());
    const std::vector<ExchangedMatrix>& matrices = kept->plan.exchanges.at(0).matrices;
    EXPECT_EQ(matrices.front().owner >= 0, compute == MatrixCompute::kOwned);
  }
}

// The bound has the way of every matrix there and back, which slow links make the longest. Without a traced
// step on shards there is no other; else its collectives may take the place of some. The way there may be
// under the backward where the loop allows it. Two replicas of two shards: half of a matrix goes to its owner
// in each replica and back; or in one of them, and three halves come back. Blocks: of the 48 rows of a piece.
TEST(MuonOptimize, BoundCountsTheLinks) {
  struct Case {
    const char* name;
    std::int64_t replicas = 1;
    bool may_stay = false, in_backward = false;
    std::int64_t block_rows = 0;
  };
  for (const Case& c :
       {Case{"owners"}, Case{.name = "owners or not", .may_stay = true},
        Case{.name = "exchanged in the backward", .in_backward = true}, Case{"two replicas", 2},
        Case{.name = "two replicas, owners or not", .replicas = 2, .may_stay = true},
        Case{.name = "blocks of rows", .block_rows = 64}}) {
    SCOPED_TRACE(c.name);
    Trace trace = MuonModel(3);
    const std::int64_t shards = 4 / c.replicas;
    if (c.may_stay) {
      AddMuon(trace, {{shards, c.replicas}});
    } else {
      AddMuon(trace, {});
    }
    constexpr std::int64_t kBytesPerSecond = 10'000;
    const Cluster cluster = testing::BalancedCluster(4, 4, kBytesPerSecond / 10);
    const auto bound = [&](Strategy strategy) -> Nanoseconds {
      if (c.replicas > 1) strategy.mesh = {{"replicate", c.replicas}, {"shard", shards}};
      // The bound is about plans that begin in the backward if the found one does.
      const std::set<std::string> fixed =
          c.in_backward ? std::set<std::string>{"owners"} : std::set<std::string>{};
      const Result<OptimizeOutput> output =
          Optimize(trace, strategy, cluster,
                   {.budget = testing::kLoose, .fixed = fixed, .time_limit_ns = {0}, .threads = 2});
      EXPECT_TRUE(output.has_value()) << ToString(output.error());
      if (!output) return {};
      EXPECT_GE(MuonStepTime(output->plan), output->report.lower_bound_ns);
      return output->report.lower_bound_ns;
    };
    std::int64_t elements = 0;
    for (const Parameter& parameter : trace.parameters) {
      if (parameter.shape.size() != 2 || !parameter.fqn.starts_with("layers.")) continue;
      const std::int64_t rows = parameter.shape[0];
      // 192 rows in blocks of 64, of which a rank has 48, 32 and 48 already.
      const bool in_blocks = c.block_rows > 0 && rows == 3 * c.block_rows;
      elements += parameter.shape[1] * (in_blocks ? 16 + 32 + 16 : rows - rows / shards);
    }
    ASSERT_GT(elements, 5'000);
    // A mean rank of four has all that leaves an owner's piece, in two bytes an element, there and back. Two
    // replicas have each matrix twice.
    const double on_links = 2.0 * static_cast<double>(elements * c.replicas) * 2 / 4 / kBytesPerSecond * 1e9;
    Strategy owners = ByOwners();
    owners.optimizer.muon->begin_in_backward = c.in_backward;
    if (c.block_rows > 0)
      owners.optimizer.muon->compute = {{.parameters = {"layers.*.up.*"}, .block_rows = c.block_rows}, {}};
    const double added = static_cast<double>((bound(owners) - bound({})).value);
    EXPECT_GT(added, on_links * (c.may_stay ? 0.3 : c.in_backward ? 0.4 : 0.9));
    EXPECT_LT(added, on_links * (c.in_backward ? 0.52 : 1.02));
  }
}

// The time of the optimizer in a plan, with the device idle before it.
Nanoseconds MuonTimeAlone(const Plan& plan) {
  const Result<Simulation> simulated = Simulate(plan);
  EXPECT_TRUE(simulated.has_value()) << ToString(simulated.error());
  return simulated ? simulated->report.optimizer_ns : Nanoseconds{};
}

// Every assignment of owners of small jobs, in each replica and over all; the steps that torch takes, too.
TEST(MuonBound, IsNotAboveAnyAssignmentOfOwners) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto replicas = static_cast<std::int64_t>(1 + random() % 2),
               shards = static_cast<std::int64_t>(2 + random() % (replicas > 1 ? 1 : 3)),
               rows = 16 * static_cast<std::int64_t>(1 + random() % 4);
    const std::int64_t ranks = replicas * shards;
    Trace trace = MuonModel(1, rows);
    AddMuon(trace, {{shards, replicas}});
    const bool in_blocks = random() % 2 == 0;
    const Cluster cluster = testing::BalancedCluster(ranks, 2, 100'000'000LL << (random() % 8));
    Nanoseconds fastest{-1};
    Plan any;
    const auto add = [&](Muon muon) {
      Strategy strategy = WithMuon(std::move(muon));
      if (replicas > 1) strategy.mesh = {{"replicate", replicas}, {"shard", shards}};
      Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      const Nanoseconds time = MuonTimeAlone(planned->plan);
      if (fastest.value < 0 || time < fastest) fastest = time;
      any = std::move(planned->plan);
    };
    if (!in_blocks) add({});
    for (const bool over_replicas : {false, true}) {
      if (over_replicas && replicas == 1) continue;
      const std::int64_t owners = over_replicas ? ranks : shards;
      for (std::int64_t of_up = 0; of_up < owners; ++of_up) {
        for (std::int64_t of_down = 0; of_down < owners; ++of_down) {
          const std::int64_t block_rows = in_blocks ? rows : 0;
          add({.compute = {{.parameters = {"layers.*.up.*"},
                            .over_replicas = over_replicas,
                            .block_rows = block_rows,
                            .owner = static_cast<std::int32_t>(of_up)},
                           {.parameters = {"layers.*.down.*"},
                            .over_replicas = over_replicas,
                            .owner = static_cast<std::int32_t>(of_down)}}});
        }
      }
    }
    const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
    for (const Unit& unit : any.units) {
      const Nanoseconds bound = internal::LeastMuonTime(trace, any, *costs, &unit, {});
      EXPECT_GT(bound.value, 0);
      EXPECT_LE(bound, fastest);
    }
  }
}

}  // namespace
}  // namespace shardplan
