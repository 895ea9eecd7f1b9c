// SPDX-License-Identifier: Apache-2.0
// Random jobs on random clusters, in whose steps kernels, links, host and memory all take their turn.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/lower_bound.h"
#include "tests/planner/random_cases.h"

namespace shardplan::testing {

struct BoundCase {
  Trace trace;
  Strategy strategy;
  Cluster cluster;
};

inline CollectiveTable RandomTable(Random& random, CollectiveKind kind, std::int64_t ranks,
                                   const std::string& link) {
  CollectiveTable table{.kind = kind, .ranks = ranks, .link = link};
  std::int64_t bytes = 1 + random.Below(64), time = 1 + random.Below(3000);
  for (int points = 1 + random.Below(5); points > 0; --points) {
    table.points.push_back({{bytes}, {time}});
    bytes += 1 + random.Below(4000);
    time += random.Below(20'000);
  }
  return table;
}

// Rates at which the small models' work is some microseconds of each kind.
inline Cluster RandomCluster(Random& random, std::int64_t ranks) {
  Cluster cluster = ClusterOf(ranks);
  cluster.ranks_per_node = random.Chance(50) ? ranks : std::max<std::int64_t>(1, ranks / 2);
  cluster.device.memory_bytes_per_second = random.Chance(20) ? 0 : 10'000'000 * (1 + random.Below(1000));
  cluster.device.vector_flops_per_second = 1'000'000'000LL * (1 + random.Below(1000));
  cluster.device.kernel_overhead_ns = {random.Below(2) * random.Below(3000)};
  cluster.host.operator_issue_ns = {random.Below(2) * random.Below(2000)};
  cluster.host.collective_issue_ns = {random.Below(1000)};
  cluster.host.runs_kernels = cluster.host.collective_issue_ns.value % 4 == 0;
  if (cluster.host.collective_issue_ns.value % 3 == 0)
    cluster.host.optimizer_issue_ns = cluster.host.collective_issue_ns;
  cluster.compute_rate_while_communicating_ppm = 1'000'000 - random.Below(2) * random.Below(900'000);
  cluster.communication_rate_while_computing_ppm = 1'000'000 - random.Below(2) * random.Below(900'000);
  for (const char* name : {"inner", "outer"}) {
    cluster.links.push_back({name, {random.Below(2000)}, 1'000'000LL * (1 + random.Below(2000))});
  }
  for (const auto kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce}) {
    if (random.Chance(30))
      cluster.collectives.push_back(RandomTable(random, kind, ranks, random.Chance(50) ? "inner" : "outer"));
  }
  return cluster;
}

// A budget that every plan fits.
inline constexpr Bytes kLoose{std::int64_t{1} << 40};

// Forward and backward of each micro-batch, then one optimizer step: what `--accumulate` makes.
inline StepProgram MicrobatchStep(std::int32_t microbatches) {
  StepProgram step;
  for (std::int32_t m = 0; m < microbatches; ++m) {
    step.push_back(ForwardCall{m, 0});
    step.push_back(BackwardCall{{m}, 0});
  }
  step.push_back(OptimizerStepCall{});
  step.push_back(ZeroGradCall{});
  return step;
}

inline BoundCase RandomBoundCase(std::uint32_t seed) {
  RandomPlanCase random_case = RandomCase(seed, seed % 5 == 0);
  Random random(seed * 2654435761U);
  random_case.strategy.cpu_offload = false;
  random_case.strategy.activation_offload.reset();
  return {std::move(random_case.trace), std::move(random_case.strategy),
          RandomCluster(random, random_case.ranks)};
}

// Collectives of all kinds, behind random operators: waited for at once, or behind one of the next, or not at
// all; sends with their receives as one group.
inline void AddCollectives(Random& random, Pass& pass, std::int32_t& number) {
  std::vector<TraceEvent> events;
  std::vector<std::int32_t> under_way;
  for (TraceEvent& event : pass.events) {
    const bool is_operator = std::holds_alternative<OperatorEvent>(event);
    events.push_back(std::move(event));
    if (!is_operator) continue;
    if (!under_way.empty() && random.Chance(50)) {
      events.push_back(CollectiveWaitEvent{under_way.back()});
      under_way.pop_back();
    }
    if (!random.Chance(25)) continue;
    ModelCollective issued{.kind = static_cast<CollectiveKind>(random.Below(kCollectiveKindCount)),
                           .communicator = random.Below(3),
                           .size_bytes = Bytes{8 + 8 * random.Below(4000)}};
    if (random.Chance(40)) under_way.push_back(issued.work = number++);
    OperatorEvent op{.name = "c10d.collective", .module = 0, .collective = issued};
    if (DescriptionOf(issued.kind).movement == CollectiveMovement::kTransfer) {
      const bool grouped = issued.work >= 0 || random.Chance(70);
      op.collective->batch = grouped ? number++ : -1;
      op.collective->peer = 1;
      op.collective->kind = CollectiveKind::kSend;
      events.push_back(op);
      op.collective->kind = CollectiveKind::kReceive;
    }
    events.push_back(std::move(op));
  }
  pass.events = std::move(events);
}

// The case with collectives of the model, and now and then with parameters that lie on a dimension of its own
// (experts). None: this one is not on the ranks.
inline std::optional<BoundCase> Communicating(std::uint32_t seed, BoundCase c) {
  Random random(seed * 40503U + 1);
  if (c.cluster.ranks != 4) return std::nullopt;
  c.trace.world_size = 4;
  c.trace.communicators = {{"ep", 2, 1}, {"outer", 2, 2}, {"all", 4, 1}};
  std::int32_t number = 0;
  for (std::vector<Pass>* passes : {&c.trace.forwards, &c.trace.backwards}) {
    for (Pass& pass : *passes) AddCollectives(random, pass, number);
  }
  if (c.strategy.policy != "fsdp2" || !c.strategy.mesh.empty() || random.Chance(40)) return c;
  for (Parameter& parameter : c.trace.parameters) {
    if (random.Chance(40)) parameter.placements = {{.mesh_dim = "ep", .size = 2, .dim = 0}};
  }
  return c;
}

inline Nanoseconds StepOf(const Plan& plan) {
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  EXPECT_TRUE(program.has_value());
  if (!program) return {};
  const Result<EngineResult> run =
      RunStep(*program, static_cast<std::int32_t>(plan.steps.size()) - 1, nullptr);
  EXPECT_TRUE(run.has_value());
  return run ? run->end_ns : Nanoseconds{};
}

inline bool Recomputes(const Plan& plan) {
  return std::ranges::any_of(plan.segments,
                             [](const Segment& s) { return s.phase == SegmentPhase::kRecompute; });
}

// Allowed prices of any kind: the checker's inequality is all that may keep a bound from being wrong.
inline CertificateBranch RandomPrices(Random& random, const WindowedWork& work, const Cluster& cluster) {
  CertificateBranch branch;
  for (std::size_t w = 0; w <= work.cuts().size(); ++w) {
    std::vector<std::int64_t> shares(cluster.links.size(), 0);
    std::int64_t left = kPriceScale;
    for (std::int64_t& share : shares) {
      share = random.Below(static_cast<int>(left) + 1);
      left -= share;
    }
    branch.windows.push_back(HighestPrices(cluster, random.Below(kPriceScale + 1), shares));
  }
  const std::size_t cuts = work.cuts().size();
  branch.bytes.assign(cuts, 0);
  if (cuts > 0 && random.Chance(40)) {
    // Bytes of one cut alone: at high prices what is there in any case decides.
    branch.bytes[static_cast<std::size_t>(random.Below(static_cast<int>(cuts)))] = std::int64_t{1}
                                                                                   << random.Below(51);
    return branch;
  }
  const int free = random.Below(100);  // percent of the cuts
  for (std::int64_t& bytes : branch.bytes) {
    // From nothing to a thousand times what a gather is worth.
    const std::int64_t price =
        (work.BytePriceOfGather() >> random.Below(6)) * (random.Below(64) << random.Below(5));
    bytes = random.Chance(free) ? 0 : std::min(price, kHighestBytePrice);
  }
  return branch;
}

}  // namespace shardplan::testing
