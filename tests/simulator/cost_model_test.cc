#include "shardplan/simulator/cost_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "shardplan/schemas/io.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

Cluster Shipped(const std::string& name) {
  Result<Cluster> cluster =
      ReadCluster(std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters/" + name + ".json");
  EXPECT_TRUE(cluster.has_value()) << ToString(cluster.error());
  return cluster ? *cluster : Cluster{};
}

std::vector<CollectivePoint> Points(std::initializer_list<std::pair<std::int64_t, std::int64_t>> points) {
  std::vector<CollectivePoint> made;
  for (const auto& [bytes, time] : points) made.push_back({Bytes{bytes}, Nanoseconds{time}});
  return made;
}

CollectiveRequest Gather(std::int64_t ranks, std::int64_t bytes, std::int64_t stride = 1) {
  return {CollectiveKind::kAllGather, ranks, stride, Bytes{bytes}};
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

TEST(Interpolation, FollowsAPowerLawBetweenPoints) {
  // 1 -> 100, 4 -> 400 (a line through the origin in log space): 2 -> 200; and 10 -> 10, 1000 -> 1000.
  EXPECT_EQ(InterpolateDuration(Points({{1, 100}, {4, 400}}), Bytes{2}).value, 200);
  EXPECT_EQ(InterpolateDuration(Points({{10, 10'000}, {1000, 1'000'000}}), Bytes{100}).value, 100'000);
  // Against floating point, for sizes without a nice logarithm.
  const auto points = Points({{1'000, 7'777}, {9'000'000, 123'456'789}});
  for (std::int64_t bytes = 1'000; bytes < 9'000'000; bytes = bytes * 5 / 3) {
    const double part = std::log(static_cast<double>(bytes) / 1'000) / std::log(9'000.0);
    const double expected = 7'777 * std::pow(123'456'789.0 / 7'777, part);
    EXPECT_NEAR(static_cast<double>(InterpolateDuration(points, Bytes{bytes}).value), expected,
                1 + expected * 1e-7);
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
}

TEST(Roofline, KnowsMatrixOperatorsByName) {
  for (const char* name :
       {"aten.mm", "aten.mm.default", "aten::addmm", "aten.bmm", "aten.baddbmm", "aten.convolution",
        "aten.convolution_backward", "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward", "aten._scaled_dot_product_cudnn_attention",
        "aten._flash_attention_forward", "aten._grouped_mm", "aten._scaled_mm", "aten.linear_backward"}) {
    EXPECT_TRUE(IsMatmulOperator(name)) << name;
  }
  for (const char* name : {"aten.add", "aten._softmax", "aten.mul", "aten.embedding", "aten.sum", "aten.silu",
                           "aten.norm", "aten.mmx", "aten.native_layer_norm", "aten.convert_element_type"}) {
    EXPECT_FALSE(IsMatmulOperator(name)) << name;
  }
}

TEST(Placement, FollowsStrideAndNodes) {
  Cluster cluster;
  cluster.ranks = 64;
  cluster.ranks_per_node = 8;
  const auto expect = [&](std::int64_t ranks, std::int64_t stride, std::int64_t in_node, std::int64_t nodes,
                          std::int64_t groups) {
    const GroupPlacement place = PlaceGroup(cluster, ranks, stride);
    EXPECT_EQ(place.ranks_in_node, in_node) << ranks << "/" << stride;
    EXPECT_EQ(place.nodes, nodes) << ranks << "/" << stride;
    EXPECT_EQ(place.concurrent_groups, groups) << ranks << "/" << stride;
  };
  expect(8, 1, 8, 1, 1);
  expect(4, 1, 4, 1, 2);
  expect(2, 4, 2, 1, 4);
  expect(64, 1, 8, 8, 1);
  expect(8, 8, 1, 8, 8);  // replicas of an HSDP mesh
  expect(16, 4, 2, 8, 4);
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
    const Result<CollectiveCost> cost = model->Collective(Gather(ranks, 1 << 28));
    ASSERT_TRUE(cost.has_value());
    EXPECT_EQ(cost->duration_ns, InterpolateDuration(table(ranks).points, Bytes{1 << 28}));
    EXPECT_TRUE(cost->source.starts_with("measured " + std::to_string(ranks) + " ranks nvlink"))
        << cost->source;
    EXPECT_EQ(cost->link, 0);
  }
  const Result<CollectiveCost> beyond = model->Collective(Gather(8, std::int64_t{1} << 33));
  EXPECT_EQ(beyond->source, "measured 8 ranks nvlink, extrapolated");
  // Numbers of ranks that nobody measured: the ring, (6 - 1) steps and 5 / 6 of the tensor.
  const Result<CollectiveCost> ring = model->Collective(Gather(6, 600'000'000));
  EXPECT_EQ(ring->source, "alpha-beta nvlink");
  const Link& link = cluster.links[0];
  EXPECT_NEAR(
      static_cast<double>(ring->duration_ns.value),
      5 * static_cast<double>(link.latency_ns.value) + 5e17 / static_cast<double>(link.bytes_per_second), 2);
}

TEST(Collectives, AlphaBetaAgreesRoughlyWithWhatWasMeasured) {
  const Cluster cluster = Shipped("h100_sxm_8");
  const auto analytic = MakeAnalyticCostModel(cluster);
  for (const CollectiveTable& table : cluster.collectives) {
    for (const CollectivePoint& point : table.points) {
      if (point.full_tensor_bytes.value < (1 << 26)) continue;
      const auto cost = analytic->Collective({table.kind, table.ranks, 1, point.full_tensor_bytes});
      const double ratio =
          static_cast<double>(cost->duration_ns.value) / static_cast<double>(point.duration_ns.value);
      // One line for all: pairs of ranks use their links less well than a ring of eight does, and the switch
      // helps eight ranks to all_reduce.
      const double slack = table.ranks == 8 ? 1.35 : 2.0;
      EXPECT_GT(ratio, 1 / slack) << table.ranks << " " << point.full_tensor_bytes.value;
      EXPECT_LT(ratio, slack) << table.ranks << " " << point.full_tensor_bytes.value;
    }
  }
}

// 64 ranks on 8 nodes, 63 / 64 of the tensor through each rank: 8 adapters a node carry it, unless NVLink is
// slower.
TEST(Collectives, AcrossNodesTheSlowerOfAdaptersAndLinkCounts) {
  Cluster cluster;
  cluster.ranks = 64;
  cluster.ranks_per_node = 8;
  cluster.links = {{"nvlink", Nanoseconds{10}, 1'000'000'000}, {"network", Nanoseconds{1'000}, 100'000'000}};
  const auto model = MakeCostModel(cluster);
  const Result<CollectiveCost> wide = model->Collective(Gather(64, 64'000));
  // 63,000 bytes at 8 * 0.1 GB/s; 56 steps in nodes, 7 between them.
  EXPECT_EQ(wide->duration_ns.value, 78'750 + 56 * 10 + 7 * 1'000);
  EXPECT_EQ(wide->source, "alpha-beta network");
  EXPECT_EQ(wide->link, 1);
  // One rank a node: its own adapter alone, 7 / 8 of the tensor, twice for an all_reduce.
  const Result<CollectiveCost> replicas = model->Collective({CollectiveKind::kAllReduce, 8, 8, Bytes{8'000}});
  EXPECT_EQ(replicas->duration_ns.value, 2 * (70'000 + 7 * 1'000));
  cluster.links.pop_back();
  const Result<CollectiveCost> missing = MakeCostModel(cluster)->Collective(Gather(64, 64'000));
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(missing.error().pointer, "/cluster/links");
}

TEST(Collectives, OneRankCostsNothing) {
  EXPECT_EQ(MakeCostModel(Cluster{})->Collective(Gather(1, 1 << 30))->duration_ns.value, 0);
}

TEST(ShippedClusters, AreCanonicalDocuments) {
  for (const char* name : {"h100_sxm_8", "h100_sxm_64", "h100_sxm_1024"}) {
    const std::string path = std::string(SHARDPLAN_SOURCE_DIR) + "/tools/clusters/" + name + ".json";
    const Result<std::string> text = ReadFile(path);
    ASSERT_TRUE(text.has_value());
    const Result<Cluster> cluster = ParseCluster(*text);
    ASSERT_TRUE(cluster.has_value()) << ToString(cluster.error());
    EXPECT_EQ(ToJson(*cluster), *text) << name;
  }
}

}  // namespace
}  // namespace shardplan::test
