// SPDX-License-Identifier: Apache-2.0
// Muon: which parameters, whose owners, what is exchanged, how long it takes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "bound/muon_work.h"
#include "policy/matrix_owners.h"
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
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

// Kernels and links take about as long as each other.
Cluster BalancedOf(std::int64_t ranks) { return testing::BalancedCluster(ranks, 2, 4'000'000'000); }

Plan MuonPlanOf(const Trace& trace, const Strategy& strategy, std::int64_t ranks = 2) {
  Result<PlannerOutput> planned = MakePlan(trace, strategy, BalancedOf(ranks));
  if (!planned) ADD_FAILURE() << ToString(planned.error());
  return planned ? std::move(planned->plan) : Plan{};
}

using testing::AddMuon;
using testing::MuonStepOf;

Trace MuonModel(int layers, std::int64_t rows = 64) {
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < layers; ++i) {
    list.children.push_back(
        {.name = std::to_string(i),
         .class_name = "Block",
         .children = {{.name = "norm", .class_name = "Norm", .parameters = {{rows}}},
                      {.name = "up", .class_name = "Linear", .parameters = {{3 * rows, 32}}},
                      {.name = "down", .class_name = "Linear", .parameters = {{rows, 32}}}}});
  }
  return testing::TraceOf(
      {.name = "",
       .children = {{.name = "embed", .class_name = "Embedding", .parameters = {{2 * rows, 32}}},
                    list,
                    {.name = "lm_head", .class_name = "Linear", .parameters = {{2 * rows, 32}}}}});
}

Strategy WithMuon(Muon muon = {}) { return {.optimizer = {.muon = std::move(muon)}}; }
Strategy ByOwners(bool over_replicas = false) {
  return WithMuon({.compute = {{.over_replicas = over_replicas}}});
}

std::string MuonErrorOf(const Trace& trace, const Strategy& strategy, std::int64_t ranks = 2) {
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, BalancedOf(ranks));
  return planned ? "" : ToString(planned.error());
}

// ---- owners ----

// torchtitan's heap of (work, bytes, work in all, rank), popped and pushed.
TEST(MuonOwners, AreThoseOfDistMuonsHeap) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto ranks = static_cast<std::size_t>(1 + random() % 9);
    std::vector<std::int64_t> earlier(ranks, 0), by_heap(ranks, 0);
    for (int exchange = 0; exchange < 3; ++exchange) {
      std::vector<MatrixLoad> loads(1 + random() % 20);
      for (std::size_t m = 0; m < loads.size(); ++m) {
        loads[m] = {static_cast<std::int64_t>(random() % 4),
                    static_cast<std::int64_t>(random() % 3),
                    fmt::format("m{}", random() % 7 * 100 + m),
                    {}};
      }
      using Entry = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int32_t>;
      std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
      for (std::size_t r = 0; r < ranks; ++r) heap.emplace(0, 0, by_heap[r], static_cast<std::int32_t>(r));
      std::vector<std::tuple<std::int64_t, std::int64_t, std::string, std::size_t>> sorted;
      for (std::size_t m = 0; m < loads.size(); ++m)
        sorted.emplace_back(-loads[m].work, -loads[m].bytes, loads[m].name, m);
      std::ranges::sort(sorted);
      std::vector<std::int32_t> expected(loads.size());
      for (const auto& [work, bytes, name, m] : sorted) {
        const auto [current, current_bytes, all, rank] = heap.top();
        heap.pop();
        expected[m] = rank;
        heap.emplace(current - work, current_bytes - bytes, all - work, rank);
      }
      while (!heap.empty()) {
        by_heap[static_cast<std::size_t>(std::get<3>(heap.top()))] = std::get<2>(heap.top());
        heap.pop();
      }
      ASSERT_EQ(AssignOwners(loads, earlier), expected);
      ASSERT_EQ(earlier, by_heap);
    }
  }
}

TEST(MuonOwners, StayWhereTheyMayBe) {
  std::vector<std::int64_t> earlier(4, 0);
  const std::vector<MatrixLoad> loads = {
      {5, 1, "a", {3}}, {4, 1, "b", {3}}, {1, 1, "c", {}}, {9, 1, "d", {1, 3}}};
  EXPECT_EQ(AssignOwners(loads, earlier), (std::vector<std::int32_t>{3, 3, 0, 1}));
  EXPECT_EQ(earlier, (std::vector<std::int64_t>{1, 9, 0, 9}));
}

TEST(MuonOwners, WorkIsOfTheThreeProducts) {
  EXPECT_EQ(NewtonSchulzWork(3, 7, 2), 2 * (2 * 3 * 3 * 7 + 3 * 3 * 3));
  EXPECT_EQ(NewtonSchulzWork(7, 3, 2), NewtonSchulzWork(3, 7, 2));
}

// ---- layouts ----

// The rank and place of each row as a list, in place of offsets.
TEST(Exchanges, PiecesAndWholesHaveEachRowOnce) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto shards = static_cast<std::int64_t>(1 + random() % 5),
               replicas = static_cast<std::int64_t>(1 + random() % 3);
    Plan plan;
    plan.communicators = {{"shard", shards, 1}, {"all", shards * replicas, 1}};
    Exchange exchange{.name = "e", .communicator = 1};
    std::vector<std::vector<std::vector<int>>> rows_of;  // by matrix and shard: rows
    for (int u = 0; u < 3; ++u) {
      Unit unit{.fqn = fmt::format("u{}", u), .shard_communicator = 0};
      const bool batch = random() % 2 == 0;
      const auto first = static_cast<std::int64_t>(1 + random() % 7),
                 inner = static_cast<std::int64_t>(1 + random() % 4);
      UnitParameter parameter{.fqn = unit.fqn + ".w", .muon = true};
      parameter.shape =
          batch ? std::vector<std::int64_t>{first, inner, 2} : std::vector<std::int64_t>{first, 2};
      unit.parameters = {parameter};
      plan.units.push_back(unit);
      const std::int64_t rows_of_first = batch ? inner : 1;
      for (std::int64_t m = 0; m < (batch ? first : 1); ++m) {
        exchange.matrices.push_back(
            {.unit = u,
             .parameter = 0,
             .first_row = batch ? m * inner : 0,
             .rows = batch ? inner : 0,
             .owner = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(shards * replicas))});
        std::vector<std::vector<int>>& by_shard = rows_of.emplace_back(static_cast<std::size_t>(shards));
        // torch.chunk along the first dimension.
        const std::int64_t chunk = (first + shards - 1) / shards;
        for (std::int64_t row = 0; row < first * rows_of_first; ++row) {
          if (batch && row / inner != m) continue;
          by_shard[static_cast<std::size_t>(row / rows_of_first / chunk)].push_back(static_cast<int>(row));
        }
      }
    }
    plan.exchanges = {exchange};
    ASSERT_TRUE(CheckExchanges(plan).has_value()) << ToString(CheckExchanges(plan).error());
    const ExchangeLayout layout(plan, plan.exchanges[0]);
    std::vector<std::int64_t> whole(static_cast<std::size_t>(shards * replicas), 0);
    for (std::int64_t rank = 0; rank < shards * replicas; ++rank) {
      std::int64_t pieces = 0;
      std::map<std::int64_t, std::int64_t> there, back;
      for (std::size_t m = 0; m < rows_of.size(); ++m) {
        const auto numel =
            static_cast<std::int64_t>(rows_of[m][static_cast<std::size_t>(rank % shards)].size()) * 2;
        const std::int64_t owner = plan.exchanges[0].matrices[m].owner;
        pieces += numel;
        if (rank / shards == owner / shards) there[owner] += numel;
        back[owner] += numel;
        if (rank / shards == owner / shards) whole[static_cast<std::size_t>(owner)] += numel;
      }
      ASSERT_EQ(layout.PiecesNumel(rank), pieces);
      for (std::int64_t other = 0; other < shards * replicas; ++other) {
        ASSERT_EQ(layout.SentNumel(ExchangeDirection::kToOwners, rank, other), there[other]);
        ASSERT_EQ(layout.SentNumel(ExchangeDirection::kToShards, other, rank), back[other]);
      }
    }
    for (std::int64_t rank = 0; rank < shards * replicas; ++rank)
      ASSERT_EQ(layout.WholeNumel(rank), whole[static_cast<std::size_t>(rank)]);
    for (const auto direction : {ExchangeDirection::kToOwners, ExchangeDirection::kToShards}) {
      // The busiest rank moves what costs say: its part of the tensor apart.
      std::int64_t most = 0;
      for (std::int64_t rank = 0; rank < shards * replicas; ++rank) {
        std::int64_t sent = 0, received = 0;
        for (std::int64_t other = 0; other < shards * replicas; ++other) {
          if (other == rank) continue;
          sent += layout.SentNumel(direction, rank, other);
          received += layout.SentNumel(direction, other, rank);
        }
        most = std::max({most, sent, received});
      }
      const ExchangeTraffic traffic = TrafficOf(plan, plan.exchanges[0], direction);
      const double ranks = static_cast<double>(shards * replicas);
      const double moved = static_cast<double>(traffic.size_bytes.value) *
                           static_cast<double>(traffic.busiest_ppm) / 1e6 * (ranks - 1) / ranks;
      ASSERT_NEAR(moved, 2.0 * static_cast<double>(most), 2.0) << "bytes of bfloat16";
    }
  }
}

// Without owners: each rank's rows, as many as the first rank has, then those of the next one.
TEST(Exchanges, WithoutOwnersAreGatheredInPiecesOfOneSize) {
  for (std::int64_t shards = 1; shards <= 5; ++shards) {
    for (std::int64_t rows = 1; rows <= 7; ++rows) {
      SCOPED_TRACE(fmt::format("{} rows on {} ranks", rows, shards));
      Plan plan;
      plan.communicators = {{"shard", shards, 1}};
      const UnitParameter matrix{.fqn = "a", .shape = {rows, 3}, .muon = true};
      const UnitParameter batch{.fqn = "b", .shape = {2, rows, 5}, .muon = true};
      plan.units = {{.fqn = "u", .parameters = {matrix, batch}, .shard_communicator = 0}};
      plan.exchanges = {{.name = "e",
                         .communicator = 0,
                         .matrices = {{.unit = 0, .parameter = 0},
                                      {.unit = 0, .parameter = 1, .rows = rows},
                                      {.unit = 0, .parameter = 1, .first_row = rows, .rows = rows}}}};
      ASSERT_TRUE(CheckExchanges(plan).has_value()) << ToString(CheckExchanges(plan).error());
      const ExchangeLayout layout(plan, plan.exchanges[0]);
      const std::int64_t padded = (rows + shards - 1) / shards * 3 + (2 + shards - 1) / shards * rows * 5;
      for (std::int64_t rank = 0; rank < shards; ++rank) {
        EXPECT_EQ(layout.PiecesNumel(rank), padded);
        EXPECT_EQ(layout.WholeNumel(rank), padded * shards);
      }
      plan.exchanges[0].matrices[1].owner = 0;
      EXPECT_FALSE(CheckExchanges(plan).has_value()) << "one of three has an owner";
      plan.exchanges[0].matrices[1].owner = -1;
      plan.communicators.push_back({"all", 2 * shards, 1});
      plan.exchanges[0].communicator = 1;
      EXPECT_FALSE(CheckExchanges(plan).has_value()) << "replicas have the same rows";
    }
  }
}

// ---- plans ----

TEST(MuonPlans, OfEveryWayVerifyAndStepEachParameterOnce) {
  for (const std::int64_t replicas : {1, 2}) {
    for (const char* way : {"sharded", "owned", "over replicas", "dist_muon", "buckets", "blocks", "on all",
                            "buckets on all", "blocks on all"}) {
      SCOPED_TRACE(fmt::format("{} replicas, {}", replicas, way));
      Trace trace = MuonModel(3);
      AddMuon(trace, {{2, replicas}});
      StorageId next = 2 << 20;
      trace.optimizer_steps.push_back(MuonStepOf({16, 32}, 1, 1, next));
      Muon muon;
      const std::string named = way;
      if (named != "sharded") muon.compute = {{.over_replicas = named == "over replicas"}};
      muon.dist_muon = named == "dist_muon";
      if (named.starts_with("buckets")) muon.buckets = {{"layers.2.*.*"}, {"layers.0.*.*"}};
      if (named.starts_with("blocks"))
        muon.compute = {{.parameters = {"layers.*.up.*"}, .block_rows = 16}, {}};
      for (MatrixRule& rule : muon.compute) {
        if (named.ends_with("on all")) rule.compute = MatrixCompute::kReplicated;
      }
      Strategy strategy = WithMuon(muon);
      if (replicas > 1) strategy.mesh = {{"replicate", replicas}, {"shard", 2}};
      const Plan plan = MuonPlanOf(trace, strategy, 2 * replicas);
      ASSERT_FALSE(plan.steps.empty());
      EXPECT_TRUE(Verify(plan).empty());
      EXPECT_EQ(std::ssize(plan.exchanges), named == "sharded" ? 0 : named.starts_with("buckets") ? 3 : 1);
      std::map<std::string, int> stepped;
      for (const Trigger& trigger : plan.steps.back().triggers) {
        for (const Instruction& i : trigger.instructions) {
          if (i.kind == InstructionKind::kOptimizerStep && i.parameter >= 0)
            ++stepped[plan.units[i.unit].parameters[i.parameter].fqn];
          if (i.kind != InstructionKind::kUpdateApply) continue;
          std::set<std::string> once;
          for (const ExchangedMatrix& matrix : plan.exchanges[i.exchange].matrices)
            once.insert(plan.units[matrix.unit].parameters[matrix.parameter].fqn);
          for (const std::string& fqn : once) ++stepped[fqn];
        }
      }
      std::map<std::string, int> expected;
      for (const Unit& unit : plan.units) {
        for (const UnitParameter& parameter : unit.parameters) {
          EXPECT_EQ(parameter.muon, parameter.shape.size() == 2 && parameter.fqn.starts_with("layers."))
              << parameter.fqn;
          if (parameter.muon) expected[parameter.fqn] = 1;
        }
      }
      EXPECT_EQ(stepped, expected);
    }
  }
}

// The trigger that each exchange is sent in, by its name.
std::map<std::string, std::string> SentIn(const Plan& plan) {
  std::map<std::string, std::string> triggers;
  for (const Trigger& trigger : plan.steps.back().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind != InstructionKind::kUpdateCopyIn) continue;
      std::string& words = triggers[plan.exchanges[i.exchange].name];
      EXPECT_EQ(words, "") << "sent twice";
      words = fmt::format("{} {} {}", Name(trigger.kind),
                          trigger.unit < 0 ? "" : plan.units[trigger.unit].fqn, trigger.microbatch);
    }
  }
  return triggers;
}

// Layers come last to first. One that two layers share waits for the second of them.
TEST(MuonPlans, ExchangesBeginBehindTheLastOfTheirReductions) {
  for (const std::int64_t replicas : {1, 2}) {
    for (const bool accumulates : {false, true}) {
      SCOPED_TRACE(fmt::format("{} replicas{}", replicas, accumulates ? ", accumulated" : ""));
      Trace trace = MuonModel(4);
      AddMuon(trace, {});
      Strategy strategy = ByOwners(replicas > 1);
      strategy.optimizer.muon->begin_in_backward = true;
      strategy.optimizer.muon->buckets = {{"layers.3.*.*"}, {"layers.0.*.*", "layers.2.*.*"}};
      strategy.mesh = {{"replicate", replicas}, {"shard", 2}};
      if (accumulates)
        strategy.program = {{ForwardCall{}, BackwardCall{}, ForwardCall{.microbatch = 1},
                             BackwardCall{.microbatches = {1}}, OptimizerStepCall{}, ZeroGradCall{}}};
      const Plan plan = MuonPlanOf(trace, strategy, 2 * replicas);
      ASSERT_FALSE(plan.steps.empty());
      EXPECT_TRUE(Verify(plan).empty());
      const int last = accumulates ? 1 : 0;
      EXPECT_EQ(SentIn(plan), (std::map<std::string, std::string>{
                                  {"muon.0", fmt::format("post_backward layers.3 {}", last)},
                                  {"muon.1", fmt::format("post_backward layers.1 {}", last)},
                                  {"muon.2", fmt::format("post_backward layers.0 {}", last)}}));
      // Their communicator is no other instruction's.
      for (const Exchange& exchange : plan.exchanges) {
        for (const Trigger& trigger : plan.steps.back().triggers) {
          for (const Instruction& i : trigger.instructions) {
            EXPECT_TRUE(i.exchange >= 0 || i.communicator != exchange.communicator) << Name(i.kind);
          }
        }
      }
    }
  }
}

// In the first of two micro-batches the gradients are not those of the step.
TEST(MuonPlans, ExchangesThatBeginTooEarlyAreFound) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {});
  Strategy strategy = ByOwners();
  strategy.optimizer.muon->begin_in_backward = true;
  strategy.program = {{ForwardCall{}, BackwardCall{}, ForwardCall{.microbatch = 1},
                       BackwardCall{.microbatches = {1}}, OptimizerStepCall{}, ZeroGradCall{}}};
  Plan plan = MuonPlanOf(trace, strategy, 2);
  ASSERT_TRUE(Verify(plan).empty());
  for (PlanStep& step : plan.steps) {
    const auto behind = [&](std::int32_t microbatch) -> std::vector<Instruction>& {
      return std::ranges::find_if(step.triggers,
                                  [&](const Trigger& trigger) {
                                    return trigger.kind == TriggerKind::kPostBackward &&
                                           plan.units[trigger.unit].fqn == "layers.0" &&
                                           trigger.microbatch == microbatch;
                                  })
          ->instructions.Edit();
    };
    std::vector<Instruction>&from = behind(1), &to = behind(0);
    const auto first = std::ranges::find_if(from, [&](const Instruction& i) {
      return i.kind == InstructionKind::kAllocate && plan.buffers[i.dst].role == BufferRole::kUpdatePieces;
    });
    ASSERT_NE(first, from.end());
    to.insert(to.end(), first, from.end());
    from.erase(first, from.end());
  }
  EXPECT_FALSE(Verify(plan).empty());
}

TEST(MuonPlans, StepTheMatricesThatTheTraceMarks) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {});
  const std::string other = trace.parameters[2].fqn;
  trace.parameters[2].muon = false;
  const Plan plan = MuonPlanOf(trace, ByOwners());
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& parameter : unit.parameters)
      EXPECT_EQ(parameter.muon, trace.parameters[parameter.index].muon) << parameter.fqn;
  }
  EXPECT_EQ(std::ranges::count(plan.strategy.optimizer.muon->matrices, other), 0);
}

TEST(MuonPlans, ExpertsStayWhereTheyAreWhole) {
  Trace trace = MuonModel(1);
  for (Parameter& parameter : trace.parameters) {
    if (parameter.fqn == "layers.0.up.weight" || parameter.shape == std::vector<std::int64_t>{192, 32})
      parameter.shape = {4, 48, 32};
  }
  AddMuon(trace, {});
  const Plan plan = MuonPlanOf(trace, ByOwners(), 2);
  ASSERT_EQ(plan.exchanges.size(), 1);
  std::vector<std::int32_t> owners;
  for (const ExchangedMatrix& matrix : plan.exchanges[0].matrices) {
    if (matrix.rows > 0) owners.push_back(matrix.owner);
  }
  EXPECT_EQ(owners, (std::vector<std::int32_t>{0, 0, 1, 1}));
}

TEST(MuonPlans, OneRankHasNothingToExchange) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {});
  const Plan plan = MuonPlanOf(trace, ByOwners(), 1);
  EXPECT_TRUE(plan.exchanges.empty());
  EXPECT_TRUE(Verify(plan).empty());
}

TEST(MuonPlans, ErrorsNameTheParameter) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {{2, 1}});
  const auto expect = [&](Muon muon, const std::string& part, std::int64_t ranks = 2) {
    const std::string error = MuonErrorOf(trace, WithMuon(std::move(muon)), ranks);
    EXPECT_NE(error.find(part), std::string::npos) << "found: " << error << "\nexpected: " << part;
  };
  const std::string up = trace.parameters[2].fqn, norm = trace.parameters[1].fqn;
  ASSERT_EQ(trace.parameters[1].shape.size(), 1);
  expect({.matrices = {"nothing.*"}}, "no parameter has this name (found nothing.*");
  expect({.matrices = {norm}}, norm + " is no matrix that Muon can step (found 1 dimension");
  expect({.compute = {{.parameters = {up}}, {.parameters = {"layers.*.*.*"}}}}, up + " is under two rules");
  expect({.compute = {{}, {}}}, "two rules are for all the rest");
  expect({.compute = {{}}, .buckets = {{up}, {"layers.0.*.*"}}}, up + " is in two buckets");
  expect({.compute = {{.parameters = {up}, .owner = 2}}},
         up + " has an owner outside of the mesh (found 2, expected 0 to 1");
  expect({.compute = {{.parameters = {up}, .block_rows = 5}}}, up + " does not divide into blocks of rows");
  expect({.compute = {{}}, .dist_muon = true, .begin_in_backward = true},
         "DistMuon exchanges when the optimizer steps");
  expect({.compute = {{.compute = MatrixCompute::kReplicated}}, .dist_muon = true},
         "DistMuon gives every matrix an owner (found replicated");
  expect({.compute = {{.compute = MatrixCompute::kReplicated, .owner = 1}}},
         "a matrix without an owner has none of it (found replicated");
  Trace unmarked = trace;
  for (Parameter& parameter : unmarked.parameters) parameter.muon = false;
  EXPECT_NE(MuonErrorOf(unmarked, WithMuon()).find("the trace has no matrix for Muon"), std::string::npos);
  expect({.ns_steps = 3}, "the trace has no step of Muon for " + up);
  expect({}, "the trace has no step of Muon for " + up + ": record it with `shardplan trace --muon 4`", 4);
  expect({}, up + " has fewer rows than ranks", 256);
  Strategy strategy = ByOwners();
  strategy.cpu_offload = true;
  EXPECT_NE(MuonErrorOf(trace, strategy).find(up + " lives in host memory"), std::string::npos)
      << MuonErrorOf(trace, strategy);
  strategy = ByOwners();
  strategy.fsdp2.shard_dims = {{.parameters = {up}, .dim = 1}};
  EXPECT_NE(MuonErrorOf(trace, strategy).find(up + " is not cut by rows (found Shard(1)"), std::string::npos)
      << MuonErrorOf(trace, strategy);
  strategy = ByOwners();
  strategy.policy = "fsdp1";
  EXPECT_NE(MuonErrorOf(trace, strategy).find("/optimizer/muon"), std::string::npos)
      << MuonErrorOf(trace, strategy);
}

// ---- time ----

Nanoseconds MuonStepTime(const Plan& plan) {
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *MakeCostModel(plan.cluster));
  EXPECT_TRUE(program.has_value()) << ToString(program.error());
  const Result<EngineResult> run =
      RunStep(*program, static_cast<std::int32_t>(program->steps.size()) - 1, nullptr);
  EXPECT_TRUE(run.has_value()) << ToString(run.error());
  return run->end_ns;
}

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
      const Result<OptimizeOutput> output =
          Optimize(trace, strategy, cluster, {.budget = testing::kLoose, .time_limit_ns = {0}, .threads = 2});
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
