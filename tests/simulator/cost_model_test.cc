// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "cost/operator_class.h"
#include "shardplan/schemas/io.h"
#include "tests/simulator/collective_costs.h"

namespace shardplan::test {
namespace {

Cluster Shipped(const std::string& name) {
  Result<Cluster> cluster =
      ReadCluster(std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters/" + name + ".json");
  EXPECT_TRUE(cluster.has_value()) << ToString(cluster.error());
  return cluster ? *cluster : Cluster{};
}

Result<CollectiveCost> Gather(const CostModel& model, const Cluster& cluster, std::int64_t ranks,
                              std::int64_t bytes) {
  return CostOf(model, cluster, CollectiveKind::kAllGather, {.size = ranks}, bytes);
}

TEST(Interpolation, IsExactAtEveryMeasuredPointOfTheShippedClusters) {
  const Cluster cluster = Shipped("h100_sxm_8");
  ASSERT_EQ(cluster.collectives.size(), 9U);
  for (const CollectiveTable& table : cluster.collectives) {
    for (const CollectivePoint& point : table.points) {
      EXPECT_EQ(InterpolateDuration(table.points, point.full_tensor_bytes), point.duration_ns);
    }
  }
}

TEST(Interpolation, IsMonotoneAndBetweenItsNeighboursEverywhere) {
  for (const CollectiveTable& table : Shipped("h100_sxm_8").collectives) {
    Nanoseconds before;
    for (std::int64_t bytes = 1; bytes < (std::int64_t{1} << 40); bytes += bytes / 7 + 1) {
      const Nanoseconds now = InterpolateDuration(table.points, Bytes{bytes});
      ASSERT_GE(now, before) << bytes;
      before = now;
    }
  }
}

TEST(Interpolation, TheBandwidthIsLinearInTheLogarithmOfTheSize) {
  // 1 byte/ns at 1,000 bytes, 2 at 4,000 (a bandwidth of both ends between them): 1.5 at 2,000.
  EXPECT_EQ(InterpolateDuration(Points({{1'000, 1'000}, {4'000, 2'000}}), Bytes{2'000}).value, 1'333);
  // Equal bandwidths: proportional to the size. Equal durations: constant.
  EXPECT_EQ(InterpolateDuration(Points({{10, 10'000}, {1000, 1'000'000}}), Bytes{100}).value, 100'000);
  EXPECT_EQ(InterpolateDuration(Points({{10, 10'000}, {1000, 10'000}}), Bytes{100}).value, 10'000);
  // Just above a plateau the bandwidth alone would give less than the plateau.
  EXPECT_EQ(InterpolateDuration(Points({{1'000, 1'000}, {2'000, 1'001}}), Bytes{1'010}).value, 1'000);
  // Against floating point, for sizes without a nice logarithm.
  const auto points = Points({{1'000, 7'777}, {9'000'000, 123'456'789}});
  for (std::int64_t bytes = 1'000; bytes < 9'000'000; bytes = bytes * 5 / 3) {
    const double part = std::log(static_cast<double>(bytes) / 1'000) / std::log(9'000.0);
    const double bandwidth = (1 - part) * 1'000 / 7'777 + part * 9e6 / 123'456'789;
    const double expected = static_cast<double>(bytes) / bandwidth;
    EXPECT_NEAR(static_cast<double>(InterpolateDuration(points, Bytes{bytes}).value), expected,
                1 + expected * 1e-3);
  }
}

TEST(Interpolation, BelowIsLatencyAboveIsBandwidth) {
  const auto points = Points({{1'000, 50}, {2'000, 60}, {4'000, 100}});
  EXPECT_EQ(InterpolateDuration(points, Bytes{1}).value, 50);
  // 40 ns for 2,000 bytes: 10,000 bytes are 6,000 more, 120 ns.
  EXPECT_EQ(InterpolateDuration(points, Bytes{10'000}).value, 220);
  EXPECT_EQ(InterpolateDuration(Points({{1'000, 50}}), Bytes{1'000'000}).value, 50);
  EXPECT_EQ(InterpolateDuration(Points({{0, 0}, {1'000, 50}}), Bytes{500}).value, 25);
}

TEST(Efficiency, InterpolatesInLogFlopsAndClamps) {
  const ComputeRate rate{DType::kBFloat16, 1'000, {{1 << 10, 200'000}, {1 << 20, 800'000}}};
  EXPECT_EQ(EfficiencyPpm(rate, 1), 200'000);
  EXPECT_EQ(EfficiencyPpm(rate, 1 << 10), 200'000);
  EXPECT_EQ(EfficiencyPpm(rate, 1 << 15), 500'000);
  EXPECT_EQ(EfficiencyPpm(rate, 1 << 20), 800'000);
  EXPECT_EQ(EfficiencyPpm(rate, 1 << 30), 800'000);
  EXPECT_EQ(EfficiencyPpm({}, 5), 1'000'000);
}

TEST(Roofline, IsTheSlowerOfArithmeticAndMemory) {
  Cluster cluster;
  cluster.device.memory_bytes_per_second = 1'000'000'000;  // a byte a nanosecond
  cluster.device.memory_efficiency_ppm = 500'000;
  cluster.device.vector_flops_per_second = 2'000'000'000;
  cluster.device.matmul = {{DType::kBFloat16, 10'000'000'000, {{1, 500'000}}}};
  cluster.device.kernel_overhead_ns = Nanoseconds{7};
  const auto model = MakeCostModel(cluster);
  OperatorEvent event{.name = "aten.mm", .dtype = DType::kBFloat16, .flops = 1'000};
  EXPECT_EQ(model->Operator(event).value, 200);  // 1,000 / (10 / 2)
  event.bytes_read = Bytes{150};
  event.bytes_written = Bytes{50};
  EXPECT_EQ(model->Operator(event).value, 400);  // 200 / 0.5
  event.name = "aten.add";
  EXPECT_EQ(model->Operator(event).value, 500);  // 1,000 / 2
  event.flops = 0;
  event.bytes_read = event.bytes_written = {};
  EXPECT_EQ(model->Operator(event).value, 7);
  event.duration_ns = Nanoseconds{3};
  EXPECT_EQ(model->Operator(event).value, 3);
  EXPECT_EQ(model->DeviceCopy(Bytes{100}, Bytes{50}).value, 300);
  EXPECT_EQ(model->DeviceCopy(Bytes{1}, Bytes{1}).value, 7);
  EXPECT_EQ(model->DeviceCopy(Bytes{0}, Bytes{0}).value, 0);
  EXPECT_EQ(model->HostWork(Bytes{1'000}).value, 0);
  cluster.host.memory_bytes_per_second = 300'000'000;
  EXPECT_EQ(model->HostWork(Bytes{1'000}).value, 3'334);  // up
}

TEST(Roofline, KnowsMatrixOperatorsByName) {
  for (const char* name :
       {"aten.mm", "aten.mm.default", "aten::addmm", "aten.bmm", "aten.baddbmm", "aten.convolution",
        "aten.convolution_backward", "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward", "aten._scaled_dot_product_cudnn_attention",
        "aten._flash_attention_forward", "aten._grouped_mm", "aten._scaled_mm", "aten.linear_backward", "mm",
        "ours.fused_matmul", "ours.matmul", "fla.chunk_fwd_o", "mamba_ssm.chunk_scan_fwd"}) {
    EXPECT_TRUE(IsMatmulOperator(name)) << name;
  }
  for (const char* name : {"aten.add", "aten._softmax", "aten.mul", "aten.embedding", "aten.sum", "aten.silu",
                           "aten.norm", "aten.mmx", "aten.native_layer_norm", "aten.convert_element_type",
                           "mamba_ssm.selective_scan_fwd", "causal_conv1d.causal_conv1d_bwd",
                           "mamba_ssm.chunk_scan_bwd_dz", "matmul_library.scale", "attention.scale"}) {
    EXPECT_FALSE(IsMatmulOperator(name)) << name;
  }
}

TEST(Classes, GoByTheNameWithoutNamespaceAndOverload) {
  const auto class_of = [](std::string_view name) { return OperatorClasses()[OperatorClassOf(name)]; };
  for (const char* name :
       {"aten::mm", "aten::mm.out", "aten.mm", "aten.mm.default", "mm", "ours.mm", "ours::mm.x"})
    EXPECT_EQ(class_of(name), "matmul") << name;
  EXPECT_EQ(class_of("xformers.efficient_attention_forward"), "attention");
  EXPECT_EQ(class_of("mamba_ssm.layer_norm_gated_fwd"), "normalization");
  EXPECT_EQ(class_of("fla.l2norm_fwd"), "normalization");
  EXPECT_EQ(class_of("aten.mul.Tensor"), "elementwise");
  EXPECT_EQ(class_of("mamba_ssm.selective_scan_fwd"), "other");
  EXPECT_EQ(class_of("mm.mul"), "other");
}

// A chunked kernel runs at the rate of matrix products of its dtype, a scan at that of vector arithmetic, and
// neither is faster than its bytes. A table by shape holds for plain products alone.
TEST(Roofline, PricesKernelsOfOtherLibrariesByTheirClass) {
  Cluster cluster;
  cluster.device.memory_bytes_per_second = 1'000'000'000;
  cluster.device.memory_efficiency_ppm = 1'000'000;
  cluster.device.vector_flops_per_second = 1'000'000'000;
  cluster.device.matmul = {{DType::kBFloat16, 10'000'000'000, {}, {{4, {{4, Nanoseconds{77'777}}}}}}};
  const auto model = MakeCostModel(cluster);
  OperatorEvent event{.dtype = DType::kBFloat16, .flops = 1'000, .bytes_written = Bytes{16}};
  for (const auto& [name, duration] :
       std::map<std::string, std::int64_t>{{"fla.chunk_fwd_o", 100},
                                           {"ours.fused_matmul", 100},
                                           {"mamba_ssm.selective_scan_fwd", 1'000},
                                           {"causal_conv1d.causal_conv1d_fwd", 1'000},
                                           {"mamba_ssm.chunk_scan_bwd_dz", 1'000}}) {
    event.name = name;
    event.bytes_read = Bytes{0};
    EXPECT_EQ(model->Operator(event).value, duration) << name;
    event.bytes_read = Bytes{5'000};
    EXPECT_EQ(model->Operator(event).value, 5'016) << name;
  }
}

using Placements = std::vector<GroupPlacement>;

TEST(Placement, FollowsStrideAndNodes) {
  Cluster cluster;
  cluster.ranks = 64;
  cluster.ranks_per_node = 8;
  const auto place = [&](std::int64_t ranks, std::int64_t stride) {
    return PlaceGroups(cluster, {.size = ranks, .stride = stride}, 64);
  };
  // Nodes, fewest and most in a node, groups in a node.
  EXPECT_EQ(place(8, 1), (Placements{{1, 8, 8, 1}}));
  EXPECT_EQ(place(4, 1), (Placements{{1, 4, 4, 2}}));
  EXPECT_EQ(place(2, 4), (Placements{{1, 2, 2, 4}}));
  EXPECT_EQ(place(64, 1), (Placements{{8, 8, 8, 1}}));
  EXPECT_EQ(place(8, 8), (Placements{{8, 1, 1, 8}}));  // replicas of an HSDP mesh
  EXPECT_EQ(place(16, 4), (Placements{{8, 2, 2, 4}}));
}

TEST(Placement, GroupsNeedNotAlignToNodes) {
  Cluster cluster;
  cluster.ranks = 12;
  cluster.ranks_per_node = 4;
  // {0..5}: four and two; {6..11}: two and four.
  EXPECT_EQ(PlaceGroups(cluster, {.size = 6}, 12), (Placements{{2, 2, 4, 2}}));
  // {0,1,2}; {3,4,5} and {6,7,8}: one or two over two nodes; {9,10,11}.
  EXPECT_EQ(PlaceGroups(cluster, {.size = 3}, 12), (Placements{{1, 3, 3, 2}, {2, 1, 2, 2}}));
  // A mesh (2, 2, 4) whose first and last dimension are flattened: {0..3, 8..11} and {4..7, 12..15}.
  cluster.ranks = 16;
  cluster.ranks_per_node = 8;
  const Communicator apart{.size = 8, .dims = {{2, 8}, {4, 1}}};
  EXPECT_EQ(PlaceGroups(cluster, apart, 16), (Placements{{2, 4, 4, 2}}));
}

// Every placement, counted rank by rank from the definition of a communicator: two ranks are in one group
// when they differ in its digits only.
TEST(Placement, IsWhatCountingRanksGives) {
  const std::vector<Communicator> communicators = {{.size = 2},
                                                   {.size = 6},
                                                   {.size = 3, .stride = 4},
                                                   {.size = 12, .stride = 2},
                                                   {.size = 4, .dims = {{2, 12}, {2, 1}}},
                                                   {
                                                       .size = 6,
                                                       .dims = {{3, 8}, {2, 2}},
                                                   },
                                                   {.size = 8, .dims = {{2, 12}, {2, 6}, {2, 1}}}};
  for (std::int64_t per_node = 1; per_node <= 25; ++per_node) {
    Cluster cluster;
    cluster.ranks = 24;
    cluster.ranks_per_node = per_node;
    const std::int64_t node = std::min<std::int64_t>(per_node, 24);
    for (const Communicator& c : communicators) {
      const auto digits = c.dims.empty() ? std::vector<CommunicatorDim>{{c.size, c.stride}} : c.dims;
      const auto same_group = [&](std::int64_t a, std::int64_t b) {
        for (const CommunicatorDim& d : digits) {
          a -= a / d.stride % d.size * d.stride;
          b -= b / d.stride % d.size * d.stride;
        }
        return a == b;
      };
      std::set<GroupPlacement> expected;
      for (std::int64_t rank = 0; rank < 24; ++rank) {
        std::map<std::int64_t, std::int64_t> members;
        for (std::int64_t other = 0; other < 24; ++other) members[other / node] += same_group(rank, other);
        std::erase_if(members, [](const auto& entry) { return entry.second == 0; });
        GroupPlacement place{std::ssize(members), 24, 0, 0};
        for (const auto& [n, count] : members) {
          place.fewest_in_node = std::min(place.fewest_in_node, count);
          place.most_in_node = std::max(place.most_in_node, count);
          std::int64_t groups = 0;  // ranks of the node that are the first of their group there
          for (std::int64_t a = n * node; a < std::min<std::int64_t>(24, (n + 1) * node); ++a) {
            bool first = true;
            for (std::int64_t b = n * node; b < a; ++b) first = first && !same_group(a, b);
            groups += first;
          }
          place.concurrent_groups = std::max(place.concurrent_groups, groups);
        }
        expected.insert(place);
      }
      EXPECT_EQ(PlaceGroups(cluster, c, 24), Placements(expected.begin(), expected.end()))
          << "size " << c.size << ", " << per_node << " ranks a node";
    }
  }
}

TEST(Collectives, AnswersFromTheTableOfItsGroup) {
  const Cluster cluster = Shipped("h100_sxm_8");
  const auto model = MakeCostModel(cluster);
  const auto table = [&](std::int64_t ranks) {
    for (const CollectiveTable& t : cluster.collectives) {
      if (t.kind == CollectiveKind::kAllGather && t.ranks == ranks) return t;
    }
    return CollectiveTable{};
  };
  for (const std::int64_t ranks : {2, 4, 8}) {
    const Result<CollectiveCost> cost = Gather(*model, cluster, ranks, 1 << 28);
    ASSERT_TRUE(cost.has_value());
    EXPECT_EQ(cost->duration_ns, InterpolateDuration(table(ranks).points, Bytes{1 << 28}));
    EXPECT_TRUE(cost->source.starts_with("measured " + std::to_string(ranks) + " ranks nvlink"))
        << cost->source;
    EXPECT_EQ(cost->loads, (LinkLoads{{1'000'000, 0}}));
  }
  const Result<CollectiveCost> beyond = Gather(*model, cluster, 8, std::int64_t{1} << 33);
  EXPECT_EQ(beyond->source, "measured 8 ranks nvlink, extrapolated");
  // Without tables the ring: (6 - 1) steps and 5 / 6 of the tensor.
  Cluster untabled = cluster;
  untabled.collectives.clear();
  untabled.links[0].protocols.clear();
  const Result<CollectiveCost> ring = Gather(*MakeCostModel(untabled), untabled, 6, 600'000'000);
  EXPECT_EQ(ring->source, "alpha-beta nvlink");
  const Link& link = cluster.links[0];
  EXPECT_NEAR(static_cast<double>(ring->duration_ns.value),
              static_cast<double>(link.base_latency_ns.value) +
                  5 * static_cast<double>(link.latency_ns.value) +
                  5e17 / static_cast<double>(link.bytes_per_second),
              2);
}

// Numbers of ranks that nobody measured are fitted: at equal shards the tensor's bandwidth, here as times for
// the tensor of 6 ranks, is linear in 1 / ranks.
TEST(Collectives, OtherNumbersOfRanksAreFitted) {
  Cluster cluster;
  cluster.ranks = 8;
  const auto table = [](CollectiveKind kind, std::int64_t ranks,
                        std::initializer_list<std::pair<std::int64_t, std::int64_t>> points) {
    return CollectiveTable{.kind = kind, .ranks = ranks, .link = "", .points = Points(points)};
  };
  cluster.collectives = {table(CollectiveKind::kAllGather, 2, {{2'000, 4'000}}),
                         table(CollectiveKind::kAllGather, 4, {{4'000, 10'000}}),
                         table(CollectiveKind::kAllGather, 8, {{8'000, 22'000}})};
  const Result<CollectiveCost> six = Gather(*MakeCostModel(cluster), cluster, 6, 6'000);
  ASSERT_TRUE(six.has_value());
  // 15,000 and 16,500; (1 / 6 - 1 / 4) / (1 / 8 - 1 / 4) = 2 / 3.
  EXPECT_EQ(six->duration_ns.value, 16'000);
  EXPECT_EQ(six->source, "fitted 6 ranks ");
  // Beyond the last: 4 -> 8 goes on, 40,000 and 44,000; (1 / 16 - 1 / 4) / (1 / 8 - 1 / 4) = 3 / 2.
  cluster.ranks = cluster.ranks_per_node = 16;
  EXPECT_EQ(Gather(*MakeCostModel(cluster), cluster, 16, 16'000)->duration_ns.value, 46'000);
  // One table: as many more steps.
  cluster.collectives.resize(1);
  EXPECT_EQ(Gather(*MakeCostModel(cluster), cluster, 4, 4'000)->duration_ns.value, 12'000);
}

TEST(Collectives, AFittedAllReduceKeepsItsRatioToGatherAndScatter) {
  Cluster cluster;
  cluster.ranks = 8;
  for (const std::int64_t ranks : {2, 4}) {
    for (const auto& [kind, time] :
         {std::pair{CollectiveKind::kAllGather, 1'000}, {CollectiveKind::kReduceScatter, 2'000}}) {
      cluster.collectives.push_back(
          {.kind = kind, .ranks = ranks, .points = Points({{ranks * 100, time * ranks}})});
    }
  }
  cluster.collectives.push_back(
      {.kind = CollectiveKind::kAllReduce, .ranks = 4, .points = Points({{400, 6'000}})});
  // Half of the 12,000 that both take on 4 ranks: half of the 24,000 on 8.
  const auto cost = CostOf(*MakeCostModel(cluster), cluster, CollectiveKind::kAllReduce, {.size = 8}, 800);
  EXPECT_EQ(cost->duration_ns.value, 12'000);
}

// A larger tensor never takes less time, whatever numbers of ranks and machine.
TEST(Collectives, FittedDurationsDoNotFall) {
  for (const char* name : {"h100_sxm_8", "b200_8", "gb200_nvl72_72"}) {
    Cluster cluster = Shipped(name);
    const auto model = MakeCostModel(cluster);
    for (std::int64_t ranks = 2; ranks <= cluster.ranks_per_node; ++ranks) {
      for (const CollectiveKind kind :
           {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce}) {
        Nanoseconds before;
        for (std::int64_t bytes = 1; bytes < (std::int64_t{1} << 38); bytes += bytes / 5 + 1) {
          const auto cost = CostOf(*model, cluster, kind, {.size = ranks}, bytes);
          ASSERT_TRUE(cost.has_value());
          ASSERT_GE(cost->duration_ns, before) << name << " " << ranks << " ranks, " << bytes;
          before = cost->duration_ns;
        }
      }
    }
  }
}

TEST(Collectives, AlphaBetaAgreesRoughlyWithWhatWasMeasured) {
  const Cluster cluster = Shipped("h100_sxm_8");
  const auto analytic = MakeAnalyticCostModel(cluster);
  for (const CollectiveTable& table : cluster.collectives) {
    for (const CollectivePoint& point : table.points) {
      if (point.full_tensor_bytes.value < (1 << 26)) continue;
      const auto cost =
          CostOf(*analytic, cluster, table.kind, {.size = table.ranks}, point.full_tensor_bytes.value);
      const double ratio =
          static_cast<double>(cost->duration_ns.value) / static_cast<double>(point.duration_ns.value);
      // One line for all, that of eight ranks: pairs of ranks use their links less well than their ring does.
      const double slack = table.ranks == 8 ? 1.27 : table.ranks == 4 ? 1.4 : 2.1;
      EXPECT_GT(ratio, 1 / slack) << table.ranks << " " << point.full_tensor_bytes.value;
      EXPECT_LT(ratio, slack) << table.ranks << " " << point.full_tensor_bytes.value;
    }
  }
}

// 64 ranks on 8 nodes, 63 / 64 of the tensor through each rank: 8 adapters a node carry it, unless NVLink is
// slower.
TEST(Collectives, AcrossNodesTheSlowerOfAdaptersAndLinkCounts) {
  Cluster cluster = TwoLinks(64, 8);
  const auto model = MakeCostModel(cluster);
  const Result<CollectiveCost> wide = Gather(*model, cluster, 64, 64'000);
  // 63,000 bytes at 8 * 0.1 GB/s; 56 steps in nodes, 7 between them.
  EXPECT_EQ(wide->duration_ns.value, 78'750 + 56 * 10 + 7 * 1'000);
  EXPECT_EQ(wide->source, "alpha-beta network");
  // A byte a nanosecond would go through NVLink, 0.8 do.
  EXPECT_EQ(wide->loads, (LinkLoads{{800'000, 1'000'000}}));
  // One rank a node: its own adapter alone, 7 / 8 of the tensor, twice for an all_reduce.
  const Result<CollectiveCost> replicas =
      CostOf(*model, cluster, CollectiveKind::kAllReduce, {.size = 8, .stride = 8}, 8'000);
  EXPECT_EQ(replicas->duration_ns.value, 2 * (70'000 + 7 * 1'000));
  cluster.links.pop_back();
  const Result<CollectiveCost> missing = Gather(*MakeCostModel(cluster), cluster, 64, 64'000);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(missing.error().pointer, "/cluster/links");
}

// {0, 1, 8, 9} are on two nodes, two on each, however near their ranks look by the stride of the last digit.
TEST(Collectives, AGroupOfDimensionsApartGoesOverTheNetwork) {
  const Cluster cluster = TwoLinks(16, 8);
  const auto model = MakeCostModel(cluster);
  const Communicator apart{.size = 4, .dims = {{2, 8}, {2, 1}}};
  const Result<CollectiveCost> cost = CostOf(*model, cluster, CollectiveKind::kAllGather, apart, 4'000);
  // 3,000 bytes at 2 * 0.1 GB/s, 2 steps in nodes, one between.
  EXPECT_EQ(cost->duration_ns.value, 15'000 + 2 * 10 + 1'000);
  EXPECT_EQ(cost->loads, (LinkLoads{{200'000, 1'000'000}}));
  const Result<CollectiveCost> neighbours = Gather(*model, cluster, 4, 4'000);
  EXPECT_EQ(neighbours->duration_ns.value, 3'000 + 3 * 10);
}

// Threes on nodes of four: {0, 1, 2} is inside a node, {3, 4, 5} has one member on the first, whose adapter
// is all that they have there.
TEST(Collectives, TheSlowestGroupCounts) {
  Cluster cluster = TwoLinks(12, 4);
  const Result<CollectiveCost> cost = Gather(*MakeCostModel(cluster), cluster, 3, 3'000);
  EXPECT_EQ(cost->duration_ns.value, 20'000 + 10 + 1'000);
  EXPECT_EQ(cost->source, "alpha-beta network");
  // A table of the inner link answers for the groups inside a node, and is faster.
  cluster.collectives = {
      {.kind = CollectiveKind::kAllGather, .ranks = 3, .link = "nvlink", .points = Points({{1, 5}})}};
  EXPECT_EQ(Gather(*MakeCostModel(cluster), cluster, 3, 3'000)->duration_ns.value, 21'010);
  // ... or slower, and then it counts.
  cluster.collectives[0].points = Points({{3'000, 50'000}});
  const Result<CollectiveCost> measured = Gather(*MakeCostModel(cluster), cluster, 3, 3'000);
  EXPECT_EQ(measured->duration_ns.value, 50'000);
  EXPECT_EQ(measured->source, "measured 3 ranks nvlink");
}

// A protocol of less latency is for small tensors, a tree for many nodes, PAT for one rank a node.
TEST(Collectives, TheFastestProtocolAndAlgorithmIsTaken) {
  Cluster cluster = TwoLinks(64, 8);
  cluster.links[0].protocols = {{"LL", Nanoseconds{1}, 500'000}};
  cluster.links[1].protocols = {{"LL", Nanoseconds{100}, 500'000}};
  const auto model = MakeCostModel(cluster);
  // LL: 56 + 7 x 100 + 63 bytes at 0.4 bytes/ns; usual: 560 + 7,000 + 79.
  const Result<CollectiveCost> small = Gather(*model, cluster, 64, 64);
  EXPECT_EQ(small->duration_ns.value, 56 + 700 + 158);
  EXPECT_EQ(small->source, "alpha-beta network LL");
  EXPECT_EQ(Gather(*model, cluster, 64, 64'000'000)->source, "alpha-beta network");
  cluster.links[1].algorithms = {CollectiveAlgorithm::kTree, CollectiveAlgorithm::kPat};
  // Twice: 7 steps in a node, 3 levels of 8 nodes, and 64 bytes at 90 % of 0.4 bytes/ns.
  const auto tree = CostOf(*model, cluster, CollectiveKind::kAllReduce, {.size = 64}, 64);
  EXPECT_EQ(tree->duration_ns.value, 2 * (7 + 300 + 178));
  EXPECT_EQ(tree->source, "alpha-beta network tree LL");
  cluster.links[1].latency_ns = Nanoseconds{1'000'000};
  cluster.links[1].protocols.clear();
  // 3 levels of 2 / 7 ms, 2.8 us for each of 8 ranks, 7 bytes at 75 % of 0.1 bytes/ns.
  const auto pat = CostOf(*model, cluster, CollectiveKind::kAllGather, {.size = 8, .stride = 8}, 8);
  EXPECT_EQ(pat->duration_ns.value, 857'143 + 22'400 + 94);
  EXPECT_EQ(pat->source, "alpha-beta network pat");
}

TEST(Collectives, ASwitchThatReducesSendsTheTensorOnce) {
  Cluster cluster = TwoLinks(8, 8);
  cluster.links[0].algorithms = {CollectiveAlgorithm::kNvls};
  const auto model = MakeCostModel(cluster);
  // 8,000 + 1,000 bytes at a byte a nanosecond and two steps; the ring has 14,000 and 14 steps.
  const auto cost = CostOf(*model, cluster, CollectiveKind::kAllReduce, {.size = 8}, 8'000);
  EXPECT_EQ(cost->duration_ns.value, 9'000 + 20);
  EXPECT_EQ(cost->source, "alpha-beta nvlink nvls");
}

// Pods of two nodes: {0 .. 15} stays in one, {0 .. 31} does not and has half of the rate.
TEST(Collectives, BeyondAPodTheNetworkIsOversubscribed) {
  Cluster cluster = TwoLinks(32, 8);
  cluster.links[1].pod_nodes = 2;
  cluster.links[1].beyond_pod_rate_ppm = 500'000;
  const auto model = MakeCostModel(cluster);
  EXPECT_EQ(Gather(*model, cluster, 16, 16'000)->duration_ns.value, 15'000 * 10 / 8 + 14 * 10 + 1'000);
  EXPECT_EQ(Gather(*model, cluster, 32, 32'000)->duration_ns.value, 31'000 * 10 / 4 + 28 * 10 + 3'000);
  // One rank of each node: pairs {0, 8} in a pod, and all four nodes.
  EXPECT_EQ(
      CostOf(*model, cluster, CollectiveKind::kAllGather, {.size = 2, .stride = 8}, 2'000)->duration_ns.value,
      10'000 + 1'000);
  EXPECT_EQ(
      CostOf(*model, cluster, CollectiveKind::kAllGather, {.size = 4, .stride = 8}, 4'000)->duration_ns.value,
      60'000 + 3'000);
}

TEST(Matmuls, StraightLinesBetweenMeasuredShapes) {
  const std::vector<MatmulRow> shapes = {{100, {{10, Nanoseconds{1'000}}, {20, Nanoseconds{1'400}}}},
                                         {300, {{10, Nanoseconds{2'000}}, {20, Nanoseconds{3'400}}}}};
  EXPECT_EQ(MatmulDuration(shapes, 100, 10).value, 1'000);
  EXPECT_EQ(MatmulDuration(shapes, 300, 20).value, 3'400);
  EXPECT_EQ(MatmulDuration(shapes, 100, 15).value, 1'200);
  EXPECT_EQ(MatmulDuration(shapes, 200, 15).value, 1'950);
  EXPECT_EQ(MatmulDuration(shapes, 300, 40).value, 3'400 + 2'800);  // beyond: on along the line
  EXPECT_EQ(MatmulDuration(shapes, 500, 20).value, 5'400);
  EXPECT_EQ(MatmulDuration(shapes, 1, 20).value, 1'400);  // the smallest output's row
  EXPECT_EQ(MatmulDuration(shapes, 100, 5).value, 800);
}

// The output's elements are its bytes over the dtype's, the inner dimension follows from the FLOPs.
TEST(Matmuls, ShapesFollowFromBytesAndFlops) {
  Cluster cluster;
  cluster.device.matmul = {{DType::kBFloat16, 1'000, {}, {{100, {{10, Nanoseconds{777}}}}}}};
  OperatorEvent event{
      .name = "aten.mm.default", .dtype = DType::kBFloat16, .flops = 2'000, .bytes_written = Bytes{200}};
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, 777);
  event.flops = 4'000;  // an inner dimension of 20
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, 1'554);
  cluster.device.clock_ppm = 500'000;  // half of the clock
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, 3'108);
  cluster.device.clock_ppm = 1'000'000;
  event.name = "aten._scaled_dot_product_flash_attention";  // no product of two matrices
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, 4'000'000'000);
}

// s / (s + half) of the rate, by the sequence that FLOPs and bytes say.
TEST(Attention, ShortSequencesReachLessOfTheRate) {
  constexpr std::int64_t kRows = 4'096, kWidth = 64, kSequence = 1'024;
  Cluster cluster;
  cluster.device.attention = {
      {.dtype = DType::kBFloat16, .flops_per_second = 1'000'000'000'000, .half_rate_sequence = 512}};
  OperatorEvent event{.name = "aten._scaled_dot_product_flash_attention",
                      .dtype = DType::kBFloat16,
                      .flops = 4 * kRows * kSequence * kWidth,
                      .bytes_written = Bytes{2 * kRows * kWidth}};
  const std::int64_t at_full_rate = (event.flops + 999) / 1'000;
  const auto with_half = [](std::int64_t time_ns) { return (time_ns * 3 + 1) / 2; };
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, with_half(at_full_rate));
  event.name = "aten._scaled_dot_product_flash_attention_backward";
  event.flops = 10 * kRows * kSequence * kWidth;
  event.bytes_written = Bytes{3 * 2 * kRows * kWidth};
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, with_half((event.flops + 999) / 1'000));
  cluster.device.attention[0].half_rate_sequence = 0;
  EXPECT_EQ(MakeCostModel(cluster)->Operator(event).value, (event.flops + 999) / 1'000);
}

// Everything on a device takes as long as on the slowest of all ranks.
TEST(Spread, MoreRanksHaveASlowerSlowest) {
  Cluster cluster;
  cluster.device.memory_bytes_per_second = 1'000'000'000;
  cluster.device.spread_ppm = 10'000;
  const auto copy_ns = [&](std::int64_t ranks) {
    cluster.ranks = ranks;
    return MakeCostModel(cluster)->DeviceCopy(Bytes{500'000}, Bytes{500'000}).value;
  };
  EXPECT_EQ(copy_ns(1), 1'000'000);
  EXPECT_EQ(copy_ns(2), 1'005'642);    // 0.5642 standard deviations
  EXPECT_EQ(copy_ns(8), 1'014'236);    // 1.4236
  EXPECT_EQ(copy_ns(512), 1'030'437);  // 3.04365
  EXPECT_EQ(copy_ns(12), (copy_ns(8) + copy_ns(16)) / 2);
  EXPECT_GT(copy_ns(1 << 20), copy_ns(1 << 12));
}

TEST(Collectives, OneRankCostsNothing) {
  EXPECT_EQ(Gather(*MakeCostModel(Cluster{}), Cluster{}, 1, 1 << 30)->duration_ns.value, 0);
}

TEST(ShippedClusters, AreCanonicalDocuments) {
  const std::string folder = std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters";
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    ++seen;
    const std::string path = entry.path().string();
    const std::string name = entry.path().stem().string();
    const Result<std::string> text = ReadFile(path);
    ASSERT_TRUE(text.has_value());
    const Result<Cluster> cluster = ParseCluster(*text);
    ASSERT_TRUE(cluster.has_value()) << ToString(cluster.error());
    EXPECT_EQ(ToJson(*cluster), *text) << name;
    // The members of a node do not send more through their adapters than they move inside it.
    if (cluster->links.size() < 2) continue;
    const Link& inner = cluster->links[0];
    const Link& outer = cluster->links[1];
    EXPECT_GE(inner.bytes_per_second, outer.bytes_per_second) << name;
    EXPECT_LE(outer.bytes_per_second * 8, inner.bytes_per_second * 2) << name;
  }
  EXPECT_GE(seen, 3);
}

}  // namespace
}  // namespace shardplan::test
