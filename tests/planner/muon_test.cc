// SPDX-License-Identifier: Apache-2.0
// Muon: which parameters, whose owners, what is exchanged.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "policy/matrix_owners.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/muon_model.h"
#include "tests/planner/synthetic.h"

namespace shardplan {
namespace {

using testing::AddMuon;
using testing::BalancedOf;
using testing::ByOwners;
using testing::MuonModel;
using testing::MuonPlanOf;
using testing::MuonStepOf;
using testing::WithMuon;

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

TEST(MuonPlans, ACollectiveInsideOfAnOwnersIterationsIsFound) {
  Trace trace = MuonModel(1);
  AddMuon(trace, {});
  Plan plan = MuonPlanOf(trace, ByOwners(), 2);
  ASSERT_TRUE(Verify(plan).empty());
  const auto whole = std::ranges::find(plan.segments, SegmentPhase::kOptimizer, &Segment::phase);
  ASSERT_NE(whole, plan.segments.end());
  OperatorEvent op{.name = "c10d.own"};
  op.collective = ModelCollective{.kind = CollectiveKind::kAllReduce, .communicator = 0, .size_bytes = {64}};
  whole->entries.emplace_back(op);
  const std::vector<Violation> found = Verify(plan);
  ASSERT_FALSE(found.empty());
  EXPECT_NE(found.front().message.find("orthogonalize runs " + whole->name +
                                       ", which has a collective of its own (all_reduce on "),
            std::string::npos)
      << found.front().message;
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

// Each replica has every matrix whole.
TEST(MuonPlans, ReplicasOfOneRankStepAsDTensorsDo) {
  Trace trace = MuonModel(2);
  AddMuon(trace, {{1, 2}});
  Strategy strategy = ByOwners();
  strategy.mesh = {{"replicate", 2}, {"shard", 1}};
  const Plan plan = MuonPlanOf(trace, strategy, 2);
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
  const std::string not_traced =
      "the trace has no step of Muon for " + up + ": record it with `shardplan trace ";
  expect({.ns_steps = 3},
         not_traced +
             "--muon 2 --muon-ns-steps 3` (found 192 x 32 in float32: on 1 rank, 5 iterations; on 2 " +
             "ranks, 5 iterations, expected on 2 ranks, 3 iterations");
  expect({.nesterov = false}, not_traced + "--muon 2 --no-muon-nesterov`");
  expect({.compute = {{.parameters = {up}, .block_rows = 3}, {}}},
         not_traced + "--muon 1 --muon-blocks " + up + "=3` (found 3 x 32 in float32: no step");
  expect({.matrices = {"embed.*"}}, "record it with `shardplan trace --muon 3 --muon-matrices embed.weight0`",
         3);
  expect({.compute = {{.parameters = {"embed.*"}}, {}}},
         "compute/0/parameters/0: no matrix that Muon steps has this name (found embed.*");
  expect({.dist_muon = true}, "DistMuon gives every matrix an owner (found no rules");
  expect({.compute = {{}}, .buckets = {{"embed.*"}}},
         "buckets/0/0: no matrix that Muon steps has this name (found embed.*");
  expect({}, "the trace has no step of Muon for " + up + ": record it with `shardplan trace --muon 4`", 4);
  expect({}, up + " has fewer rows than ranks", 256);
  Strategy strategy = ByOwners();
  strategy.mesh = {{"replicate", 2}, {"shard", 1}};
  EXPECT_NE(MuonErrorOf(trace, strategy).find(not_traced + "--muon 2x1`"), std::string::npos)
      << MuonErrorOf(trace, strategy);
  strategy = ByOwners();
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

}  // namespace
}  // namespace shardplan
