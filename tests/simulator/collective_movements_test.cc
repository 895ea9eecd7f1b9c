// SPDX-License-Identifier: Apache-2.0
// Costs of what is no ring: exchanges, chains, and sends from rank to rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <tuple>

#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/cost_model.h"
#include "tests/simulator/collective_costs.h"

namespace shardplan::test {
namespace {

constexpr std::int64_t kWholeLink = 1'000'000;

CollectiveCost Modelled(const Cluster& cluster, CollectiveKind kind, const Communicator& communicator,
                        std::int64_t bytes, std::int64_t busiest_ppm = kWholeLink) {
  const auto model = MakeCostModel(cluster);
  const Result<CollectiveCost> cost = CostOf(*model, cluster, kind, communicator, bytes, busiest_ppm);
  EXPECT_TRUE(cost.has_value()) << ToString(cost.error());
  return cost ? *cost : CollectiveCost{};
}

constexpr std::array kDirect = {CollectiveKind::kAllToAll, CollectiveKind::kGather, CollectiveKind::kScatter};
constexpr std::array kChains = {CollectiveKind::kBroadcast, CollectiveKind::kReduce};
constexpr std::array kSends = {CollectiveKind::kSend, CollectiveKind::kReceive};

TEST(Movements, EveryRankSendsEachOtherItsPartAtOnce) {
  const Cluster cluster = TwoLinks(64, 8);
  for (const CollectiveKind kind : kDirect) {
    // 7 of 8 parts at a byte a nanosecond, and a step for each.
    const CollectiveCost inside = Modelled(cluster, kind, {.size = 8}, 8'000);
    EXPECT_EQ(inside.duration_ns.value, 7'000 + 7 * 10) << Name(kind);
    EXPECT_EQ(inside.loads, (LinkLoads{{kWholeLink, 0}}));
    EXPECT_EQ(inside.source, "alpha-beta nvlink");
    // 56 of 64 parts go to other nodes, each rank's through its own adapter; 7 stay, and take an eightieth.
    const CollectiveCost across = Modelled(cluster, kind, {.size = 64}, 64'000);
    EXPECT_EQ(across.duration_ns.value, 560'000 + 7 * 10 + 7 * 1'000) << Name(kind);
    EXPECT_EQ(across.loads, (LinkLoads{{12'500, kWholeLink}}));
    EXPECT_EQ(across.source, "alpha-beta network");
    // One rank in each node: nothing stays.
    const CollectiveCost apart = Modelled(cluster, kind, {.size = 8, .stride = 8}, 8'000);
    EXPECT_EQ(apart.duration_ns.value, 70'000 + 7 * 1'000) << Name(kind);
    EXPECT_EQ(apart.loads, (LinkLoads{{0, kWholeLink}}));
  }
}

// {3, 4, 5} on nodes of four: rank 3 is alone on its node and sends two of three parts away.
TEST(Movements, TheRankWithFewestNeighboursSendsMostAway) {
  const CollectiveCost cost = Modelled(TwoLinks(12, 4), CollectiveKind::kAllToAll, {.size = 3}, 3'000);
  EXPECT_EQ(cost.duration_ns.value, 20'000 + 10 + 1'000);
}

// A network so wide that what stays in the node takes longer.
TEST(Movements, TheSlowerLinkOfAnExchangeIsWhollyUsed) {
  Cluster cluster = TwoLinks(16, 8);
  cluster.links[1].bytes_per_second = 4'000'000'000;
  const CollectiveCost cost = Modelled(cluster, CollectiveKind::kAllToAll, {.size = 16}, 16'000);
  EXPECT_EQ(cost.duration_ns.value, 7'000 + 7 * 10 + 1'000);  // 8 parts at 4 bytes/ns are 2,000
  EXPECT_EQ(cost.loads, (LinkLoads{{kWholeLink, 285'714}}));
}

TEST(Movements, AChainMovesTheWholeTensorOnce) {
  Cluster cluster = TwoLinks(64, 8);
  for (const CollectiveKind kind : kChains) {
    EXPECT_EQ(Modelled(cluster, kind, {.size = 8}, 8'000).duration_ns.value, 8'000 + 7 * 10) << Name(kind);
    // 8 adapters a node; 56 steps in nodes, 7 between them.
    const CollectiveCost across = Modelled(cluster, kind, {.size = 64}, 64'000);
    EXPECT_EQ(across.duration_ns.value, 80'000 + 56 * 10 + 7 * 1'000) << Name(kind);
    EXPECT_EQ(across.loads, (LinkLoads{{800'000, kWholeLink}}));
  }
  // NCCL's protocols hold for chains, too, and its trees do not.
  cluster.links[0].protocols = {{"LL", Nanoseconds{1}, 500'000}};
  cluster.links[0].algorithms = {CollectiveAlgorithm::kTree, CollectiveAlgorithm::kNvls};
  const CollectiveCost small = Modelled(cluster, CollectiveKind::kBroadcast, {.size = 8}, 8);
  EXPECT_EQ(small.duration_ns.value, 16 + 7 * 1);
  EXPECT_EQ(small.source, "alpha-beta nvlink LL");
}

TEST(Movements, ASendMovesTheWholeMessageOverOneLink) {
  const Cluster cluster = TwoLinks(64, 8);
  for (const CollectiveKind kind : kSends) {
    const CollectiveCost inside = Modelled(cluster, kind, {.size = 4}, 8'000);
    EXPECT_EQ(inside.duration_ns.value, 8'000 + 10) << Name(kind);
    EXPECT_EQ(inside.loads, (LinkLoads{{kWholeLink, 0}}));
    for (const Communicator& across : {Communicator{.size = 64}, {.size = 8, .stride = 8}}) {
      const CollectiveCost cost = Modelled(cluster, kind, across, 8'000);
      EXPECT_EQ(cost.duration_ns.value, 80'000 + 1'000) << Name(kind);
      EXPECT_EQ(cost.loads, (LinkLoads{{0, kWholeLink}}));
    }
  }
}

TEST(Movements, BeyondAPodDirectSendsHaveItsPartOfTheRate) {
  Cluster cluster = TwoLinks(32, 8);
  cluster.links[1].pod_nodes = 2;
  cluster.links[1].beyond_pod_rate_ppm = 500'000;
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kSend, {.size = 16}, 1'000).duration_ns.value, 11'000);
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kSend, {.size = 32}, 1'000).duration_ns.value, 21'000);
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kAllToAll, {.size = 16}, 1'600).duration_ns.value,
            8'000 + 70 + 1'000);
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kAllToAll, {.size = 32}, 3'200).duration_ns.value,
            48'000 + 70 + 3'000);
}

TEST(Movements, TheBusiestRankSaysHowLongAnExchangeTakes) {
  Cluster cluster = TwoLinks(64, 8);
  const auto duration = [&](std::int64_t bytes, std::int64_t busiest_ppm) {
    return Modelled(cluster, CollectiveKind::kAllToAll, {.size = 8}, bytes, busiest_ppm).duration_ns;
  };
  EXPECT_EQ(duration(8'000, 2 * kWholeLink), duration(16'000, kWholeLink));
  EXPECT_EQ(duration(8'000, 1'250'000).value, 8'750 + 70);
  // So does a table: at the size that the busiest rank moves.
  cluster.collectives = {{.kind = CollectiveKind::kAllToAll,
                          .ranks = 8,
                          .link = "nvlink",
                          .points = Points({{8'000, 100}, {16'000, 300}})}};
  EXPECT_EQ(duration(8'000, kWholeLink).value, 100);
  EXPECT_EQ(duration(8'000, 2 * kWholeLink).value, 300);
}

// H100, all_to_all inside a node: what XLA's performance table of NCCL (Apache-2.0,
// xla/service/gpu/model/collective_interpolator_data.h) has from 128 MiB on, in GB of the tensor a second. No
// figure of the cluster is fitted to it.
TEST(Movements, AnExchangeInsideAnH100NodeIsNearWhatWasMeasured) {
  const Result<Cluster> cluster =
      ReadCluster(std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters/h100_sxm_8.json");
  ASSERT_TRUE(cluster.has_value());
  const auto analytic = MakeAnalyticCostModel(*cluster);
  struct Measured {
    std::int64_t ranks, mebibytes;
    double gigabytes_per_second;
  };
  for (const Measured& m : {Measured{8, 128, 325.3},
                            {8, 512, 367.6},
                            {8, 2048, 388.1},
                            {4, 128, 374.9},
                            {4, 512, 422.0},
                            {4, 2048, 468.7},
                            {2, 512, 558.9},
                            {2, 2048, 642.7}}) {
    const auto bytes = m.mebibytes << 20;
    const auto cost = CostOf(*analytic, *cluster, CollectiveKind::kAllToAll, {.size = m.ranks}, bytes);
    const double rate = static_cast<double>(bytes) / static_cast<double>(cost->duration_ns.value);
    EXPECT_NEAR(rate, m.gigabytes_per_second, 0.25 * m.gigabytes_per_second)
        << m.ranks << " ranks, " << m.mebibytes << " MiB";
  }
}

// Durations of sizes that grow, on a communicator of `ranks` ranks over `nodes` nodes; the last one.
Nanoseconds CheckGrowth(Cluster cluster, CollectiveKind kind, std::int64_t ranks, std::int64_t nodes) {
  SCOPED_TRACE(std::string(Name(kind)) + ", " + std::to_string(ranks) + " ranks on " + std::to_string(nodes));
  cluster.ranks = ranks;
  cluster.ranks_per_node = ranks / nodes;
  Nanoseconds smaller;
  for (std::int64_t bytes = 1; bytes < (std::int64_t{1} << 36); bytes += 1 + bytes * 3) {
    const CollectiveCost cost = Modelled(cluster, kind, {.size = ranks}, bytes);
    EXPECT_GE(cost.duration_ns, smaller) << bytes;
    EXPECT_EQ(std::ranges::max(cost.loads.ppm), kWholeLink);
    EXPECT_GE(std::ranges::min(cost.loads.ppm), 0);
    smaller = cost.duration_ns;
  }
  return smaller;
}

// Kinds x placements on random machines whose network is the narrow part. An adapter has at most half the
// rate of the links inside a node, and a step between nodes takes longer than all steps inside. Otherwise two
// links may be done with an exchange sooner than one.
TEST(Movements, GrowWithBytesAndNodesAndNeverOverloadALink) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto between = [&](std::int64_t least, std::int64_t most) {
      return std::uniform_int_distribution(least, most)(random);
    };
    Cluster cluster = TwoLinks(64, 64);
    Link& inner = cluster.links[0];
    inner.bytes_per_second = between(1'000'000'000, 1'000'000'000'000);
    inner.latency_ns = Nanoseconds{between(0, 10'000)};
    cluster.links[1].bytes_per_second = between(1'000, inner.bytes_per_second / 2);
    cluster.links[1].latency_ns = Nanoseconds{64 * inner.latency_ns.value + between(0, 10'000)};
    for (const CollectiveDescription& is : kCollectiveKinds) {
      for (const std::int64_t ranks : {2, 6, 8, 48, 64}) {
        Nanoseconds fewer_nodes;
        for (std::int64_t nodes = 1; nodes <= ranks; ++nodes) {
          if (ranks % nodes != 0) continue;
          const Nanoseconds longest = CheckGrowth(cluster, is.kind, ranks, nodes);
          EXPECT_GE(longest, fewer_nodes) << Name(is.kind) << ", " << ranks << " ranks on " << nodes;
          fewer_nodes = longest;
        }
      }
    }
  }
}

TEST(MovementTables, AnswerForTheirOwnKind) {
  Cluster cluster = TwoLinks(16, 8);
  std::int64_t time = 1'000;
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (is.measured.empty()) continue;
    cluster.collectives.push_back(
        {.kind = is.kind, .ranks = 8, .link = "nvlink", .points = Points({{8'000, time += 1'000}})});
  }
  for (const CollectiveTable& table : cluster.collectives) {
    const CollectiveCost cost = Modelled(cluster, table.kind, {.size = 8}, 8'000);
    EXPECT_EQ(cost.duration_ns, table.points[0].duration_ns) << Name(table.kind);
    EXPECT_EQ(cost.source, "measured 8 ranks nvlink") << Name(table.kind);
  }
  // A recv takes what its send takes, wherever the table came from.
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kReceive, {.size = 8}, 8'000).duration_ns,
            Modelled(cluster, CollectiveKind::kSend, {.size = 8}, 8'000).duration_ns);
  cluster.collectives = {
      {.kind = CollectiveKind::kReceive, .ranks = 8, .link = "nvlink", .points = Points({{8'000, 77}})}};
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kSend, {.size = 8}, 8'000).duration_ns.value, 77);
  // Loads are those of the movement, whoever measured.
  cluster.collectives = {
      {.kind = CollectiveKind::kAllToAll, .ranks = 16, .link = "network", .points = Points({{8'000, 77}})}};
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kAllToAll, {.size = 16}, 8'000).loads,
            Modelled(TwoLinks(16, 8), CollectiveKind::kAllToAll, {.size = 16}, 8'000).loads);
}

// At equal parts, tensor over time is linear in 1 / ranks, as for the shards of a ring.
TEST(MovementTables, OfPartsAreFittedAtEqualParts) {
  for (const CollectiveKind kind : kDirect) {
    Cluster cluster = TwoLinks(8, 8);
    for (const auto& [ranks, bytes, time] :
         {std::tuple{2, 2'000, 4'000}, {4, 4'000, 10'000}, {8, 8'000, 22'000}}) {
      cluster.collectives.push_back(
          {.kind = kind, .ranks = ranks, .link = "nvlink", .points = Points({{bytes, time}})});
    }
    const CollectiveCost six = Modelled(cluster, kind, {.size = 6}, 6'000);
    EXPECT_EQ(six.duration_ns.value, 16'000) << Name(kind);
    EXPECT_EQ(six.source, "fitted 6 ranks nvlink");
  }
}

TEST(MovementTables, OfWholeTensorsHoldForOtherNumbersOfRanks) {
  Cluster cluster = TwoLinks(8, 8);
  for (const CollectiveKind kind :
       {CollectiveKind::kBroadcast, CollectiveKind::kReduce, CollectiveKind::kSend}) {
    for (const auto& [ranks, time] : {std::pair{2, 500}, {8, 900}}) {
      cluster.collectives.push_back({.kind = kind,
                                     .ranks = ranks,
                                     .link = "nvlink",
                                     .points = Points({{1'000, time}, {2'000, 2 * time}})});
    }
    EXPECT_EQ(Modelled(cluster, kind, {.size = 3}, 1'000).duration_ns.value, 500) << Name(kind);
    EXPECT_EQ(Modelled(cluster, kind, {.size = 6}, 2'000).duration_ns.value, 1'800) << Name(kind);
    EXPECT_EQ(Modelled(cluster, kind, {.size = 6}, 2'000).source, "fitted 6 ranks nvlink") << Name(kind);
  }
  // Sends between two nodes were measured: they hold for groups that fill no node, on any number of nodes.
  cluster.ranks = 64;
  cluster.collectives = {{.kind = CollectiveKind::kSend,
                          .ranks = 2,
                          .link = "network",
                          .nodes = 2,
                          .points = Points({{1'000, 600}})}};
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kSend, {.size = 8, .stride = 8}, 1'000).duration_ns.value, 600);
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kReceive, {.size = 64}, 1'000).duration_ns.value, 600);
  EXPECT_EQ(Modelled(cluster, CollectiveKind::kSend, {.size = 8}, 1'000).source, "alpha-beta nvlink");
}

}  // namespace
}  // namespace shardplan::test
