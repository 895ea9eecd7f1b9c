// SPDX-License-Identifier: Apache-2.0
// Random jobs on random clusters, in whose steps kernels, links, host and memory all take their turn.
#pragma once

#include <algorithm>

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
  return {std::move(random_case.trace), std::move(random_case.strategy),
          RandomCluster(random, random_case.ranks)};
}

}  // namespace shardplan::testing
