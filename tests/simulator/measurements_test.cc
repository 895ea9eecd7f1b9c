// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/measurements.h"

#include <gtest/gtest.h>

#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::test {
namespace {

constexpr std::string_view kHead =
    "device,collective,concurrent_groups,ranks_per_group,full_tensor_bytes,duration_ns\n";

CollectiveMeasurement Row(std::int64_t bytes, std::int64_t duration) {
  return {"x", CollectiveKind::kAllGather, 1, 4, Bytes{bytes}, Nanoseconds{duration}};
}

TEST(Measurements, AreReadInAnyOrderOfColumns) {
  const auto read = ParseMeasurements(
      "duration_ns,collective,device,note,ranks_per_group,concurrent_groups,full_tensor_bytes\r\n"
      "7,all-reduce,m,hello,4,2,1024\r\n\r\n");
  ASSERT_TRUE(read.has_value()) << ToString(read.error());
  ASSERT_EQ(read->collectives.size(), 1U);
  const CollectiveMeasurement& row = read->collectives[0];
  EXPECT_EQ(row.device, "m");
  EXPECT_EQ(row.kind, CollectiveKind::kAllReduce);
  EXPECT_EQ(row.ranks, 4);
  EXPECT_EQ(row.concurrent_groups, 2);
  EXPECT_EQ(row.full_tensor_bytes.value, 1024);
  EXPECT_EQ(row.duration_ns.value, 7);
  const auto matmuls = ParseMeasurements("device,dtype,batch,m,n,k,duration_ns\nd,bf16,1,2,3,4,5");
  ASSERT_TRUE(matmuls.has_value());
  EXPECT_EQ(OperatorOf(matmuls->matmuls.at(0)).flops, 48);
  EXPECT_EQ(OperatorOf(matmuls->matmuls.at(0)).bytes_read.value, 2 * (8 + 12));
  EXPECT_EQ(OperatorOf(matmuls->matmuls.at(0)).bytes_written.value, 12);
}

TEST(Measurements, NameEveryKindButTheRecvOfASend) {
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (is.kind == CollectiveKind::kReceive) {
      EXPECT_FALSE(ParseMeasurements(std::string(kHead) + "m,recv,1,4,1024,7\n").has_value());
      continue;
    }
    const auto read =
        ParseMeasurements(std::string(kHead) + "m," + std::string(is.measured) + ",1,4,1024,7\n");
    ASSERT_TRUE(read.has_value()) << is.measured;
    EXPECT_EQ(read->collectives.at(0).kind, is.kind);
    EXPECT_EQ(CollectiveOfProgram(is.nccl_tests), is.kind);
  }
  EXPECT_EQ(CollectiveOfProgram("hypercube"), std::nullopt);
}

TEST(Measurements, SayWhatIsWrongAndWhere) {
  const auto error_of = [](const std::string& text) {
    const auto read = ParseMeasurements(text);
    EXPECT_FALSE(read.has_value()) << text;
    return read ? Error{} : read.error();
  };
  const std::string head(kHead);
  EXPECT_EQ(error_of("").pointer, "/line/1");
  EXPECT_EQ(error_of("device,ranks\n").pointer, "/line/1");
  const Error kind = error_of(head + "d,all-gather,1,2,1024,9\nd,barrier,1,2,1024,9\n");
  EXPECT_EQ(kind.pointer, "/line/3");
  EXPECT_EQ(kind.found, "barrier");
  for (const char* row : {"d,all-gather,1,2,1024", "d,all-gather,1,2,1024,0", "d,all-gather,1,2,1e3,9",
                          "d,all-gather,1,2,1024,9,9", ",all-gather,1,2,1024,9", "d,all-gather,-1,2,1024,9",
                          "d,all-gather,1,99999999999,1024,9", "d,all-gather,1,2,99999999999999999999,9"}) {
    const Error error = error_of(head + row);
    EXPECT_EQ(error.code, ErrorCode::kBadInput) << row;
    EXPECT_EQ(error.pointer, "/line/2") << row;
    EXPECT_FALSE(error.expected.empty()) << row;
  }
  EXPECT_EQ(error_of("device,dtype,batch,m,n,k,duration_ns\nd,bf16,9000000,9000000,9000000,9,9").pointer,
            "/line/2");
}

TEST(TableFit, OneOutlierMovesNothingButItself) {
  std::vector<CollectiveMeasurement> rows;
  for (const auto& [bytes, time] : {std::pair{1'024, 100}, {2'048, 900}, {4'096, 102}, {8'192, 104}}) {
    rows.push_back(Row(bytes, time));
  }
  const auto tables = FitCollectiveTables(rows, Cluster{.links = {{.name = "nvlink"}}}, "here");
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].link, "nvlink");
  EXPECT_EQ(tables[0].source, "here");
  std::vector<std::int64_t> times;
  for (const CollectivePoint& point : tables[0].points) times.push_back(point.duration_ns.value);
  // 900, 102, 104 are pooled: their median.
  EXPECT_EQ(times, (std::vector<std::int64_t>{100, 104, 104, 104}));
  EXPECT_EQ(tables[0].scatter_ppm, (0 + 19'231) / 2 + 1);
}

TEST(TableFit, NeverFallsAndKeepsWhatIsSteady) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const std::vector<CollectiveMeasurement> rows = {Row(8 * kMiB, 700), Row(kMiB, 500), Row(16 * kMiB, 600),
                                                   Row(32 * kMiB, 900), Row(64 * kMiB, 1'500)};
  const auto tables = FitCollectiveTables(rows, Cluster{}, "");
  std::vector<std::int64_t> times;
  for (const CollectivePoint& point : tables.at(0).points) times.push_back(point.duration_ns.value);
  EXPECT_EQ(times, (std::vector<std::int64_t>{500, 600, 600, 900, 1'500}));
}

// Durations of a machine that obeys a + b x output + c x output x inner: cells that were left out are found
// again, and shapes between the measured ones are on the lines.
TEST(ShapeFit, FindsWhatWasLeftOut) {
  const auto truth = [](std::int64_t output, std::int64_t inner) {
    return 5'000 + output / 64 + output * inner / 4096;
  };
  std::vector<MatmulMeasurement> rows;
  for (const std::int64_t output : {1 << 16, 1 << 17, 1 << 18, 1 << 19}) {
    for (const std::int64_t inner : {256, 512, 1024, 2048}) {
      if (output == 1 << 17 && inner == 512) continue;
      rows.push_back({"x", DType::kBFloat16, 1, output / 256, 256, inner, Nanoseconds{truth(output, inner)}});
    }
  }
  const std::vector<MatmulRow> shapes = FitMatmulShapes(rows);
  ASSERT_EQ(shapes.size(), 4U);
  for (const MatmulRow& row : shapes) EXPECT_EQ(row.points.size(), 4U);
  for (const std::int64_t output : {1 << 16, 1 << 17, 3 << 16, 1 << 19, 1 << 21}) {
    for (const std::int64_t inner : {128, 256, 512, 700, 2048, 8192}) {
      const auto expected = static_cast<double>(truth(output, inner));
      EXPECT_NEAR(static_cast<double>(MatmulDuration(shapes, output, inner).value), expected, expected * 1e-3)
          << output << " x " << inner;
    }
  }
}

TEST(ClusterFit, TakesItsDevicesRowsAlone) {
  Cluster base;
  base.device.table_name = "x";
  base.device.matmul = {{.dtype = DType::kFloat16}, {.dtype = DType::kFloat32}};
  base.links = {{.name = "inner", .bytes_per_second = 1}};
  Measurements measured;
  for (const std::int64_t ranks : {2, 4}) {
    for (const std::int64_t bytes : {1'000, 1'000'000'000, 2'000'000'000}) {
      // Two bytes a nanosecond through each rank, and 500 ns a step.
      const std::int64_t time = 500 * (ranks - 1) + bytes / ranks * (ranks - 1) / 2;
      measured.collectives.push_back(
          {"x", CollectiveKind::kAllGather, 1, ranks, Bytes{bytes}, Nanoseconds{time}});
    }
  }
  measured.collectives.push_back({"y", CollectiveKind::kAllGather, 1, 8, Bytes{1}, Nanoseconds{1}});
  measured.matmuls = {{"x", DType::kBFloat16, 1, 16, 16, 16, Nanoseconds{5}}};
  const Result<ClusterFit> fit = FitCluster(base, measured, "here");
  ASSERT_TRUE(fit.has_value());
  const Cluster& fitted = fit->cluster;
  EXPECT_EQ(fit->passed_over, std::vector<std::string>{"1 row of device y"});
  EXPECT_EQ(fitted.collectives.size(), 2U);
  EXPECT_EQ(fitted.links[0].bytes_per_second, 2'000'000'000);
  EXPECT_NEAR(static_cast<double>(fitted.links[0].latency_ns.value), 500,
              130);  // and some of the 1,000 bytes
  EXPECT_LE(fitted.links[0].base_latency_ns.value, 250);
  EXPECT_EQ(fitted.device.matmul[0].shapes.size(), 1U);  // float16 has bfloat16's
  EXPECT_TRUE(fitted.device.matmul[1].shapes.empty());
}

// The kind of what went wrong in silence: rows that are of no use are said, tables that nobody measured stay.
TEST(ClusterFit, KeepsWhatNobodyMeasuredAndSaysIt) {
  Cluster base;
  base.ranks = 64;
  base.device.table_name = "x";
  base.links = {{.name = "inner", .bytes_per_second = 100}, {.name = "outer", .bytes_per_second = 10}};
  for (const std::int64_t ranks : {2, 8}) {
    base.collectives.push_back(
        {.kind = CollectiveKind::kAllGather,
         .ranks = ranks,
         .link = "inner",
         .points = {{Bytes{1 << 20}, Nanoseconds{77}}, {Bytes{1 << 30}, Nanoseconds{78'000}}}});
  }
  const auto row = [](CollectiveKind kind, std::int64_t ranks, std::int64_t groups, std::int64_t nodes) {
    return CollectiveMeasurement{"x", kind, groups, ranks, Bytes{1 << 20}, Nanoseconds{5'000}, nodes};
  };
  const auto fit = [&](std::vector<CollectiveMeasurement> rows) {
    const Result<ClusterFit> made = FitCluster(base, {.collectives = std::move(rows)}, "here");
    EXPECT_TRUE(made.has_value());
    return made ? *made : ClusterFit{};
  };
  // Between nodes: where the cost model looks for it, and it alone changes.
  const ClusterFit between = fit({row(CollectiveKind::kAllReduce, 16, 1, 0)});
  ASSERT_EQ(between.cluster.collectives.size(), 3U);
  EXPECT_EQ(between.cluster.collectives[2].link, "outer");
  EXPECT_EQ(between.cluster.collectives[2].nodes, 2);
  EXPECT_EQ(between.cluster.links, base.links);
  EXPECT_EQ(between.changed.size(), 1U);
  EXPECT_EQ(between.stayed.size(), 4U);  // two tables, two links
  // Few ranks do not say what the largest number has.
  const ClusterFit two = fit({row(CollectiveKind::kAllGather, 2, 1, 0)});
  EXPECT_EQ(two.cluster.links, base.links);
  EXPECT_EQ(two.cluster.collectives.size(), 2U);
  EXPECT_EQ(two.cluster.collectives[0].points.size(), 1U);
  EXPECT_EQ(two.cluster.collectives[1], base.collectives[1]);
  // Groups with one rank in each node are no whole nodes.
  const ClusterFit apart =
      fit({row(CollectiveKind::kAllReduce, 2, 8, 2), row(CollectiveKind::kSend, 2, 1, 0)});
  EXPECT_EQ(apart.cluster.collectives[2].nodes, 2);
  EXPECT_EQ(apart.cluster.collectives[2].concurrent_groups, 8);
  EXPECT_EQ(apart.cluster.collectives[3].kind, CollectiveKind::kSend);
  EXPECT_EQ(apart.cluster.collectives[3].link, "inner");
  EXPECT_TRUE(apart.passed_over.empty());
  const auto none = FitCluster(
      base, {.collectives = {{"y", CollectiveKind::kAllGather, 1, 2, Bytes{1}, Nanoseconds{1}}}}, "");
  ASSERT_FALSE(none.has_value());
  EXPECT_NE(none.error().found.find("y"), std::string::npos);
  EXPECT_NE(none.error().expected.find("x"), std::string::npos);
}

// A link's figures are those of rings: what an exchange or a send reaches is its own table's.
TEST(ClusterFit, OnlyRingsMoveTheLink) {
  Cluster base;
  base.ranks = base.ranks_per_node = 8;
  base.device.table_name = "x";
  base.links = {{.name = "inner", .latency_ns = Nanoseconds{7}, .bytes_per_second = 100}};
  for (const CollectiveDescription& is : kCollectiveKinds) {
    if (is.measured.empty()) continue;
    std::vector<CollectiveMeasurement> rows;
    for (const std::int64_t bytes : {1'000, 1'000'000'000, 2'000'000'000})
      rows.push_back({"x", is.kind, 1, 8, Bytes{bytes}, Nanoseconds{5'000 + bytes}});
    const Result<ClusterFit> fit = FitCluster(base, {.collectives = rows}, "here");
    ASSERT_TRUE(fit.has_value());
    ASSERT_EQ(fit->cluster.collectives.size(), 1U);
    EXPECT_EQ(fit->cluster.collectives[0].kind, is.kind);
    EXPECT_EQ(fit->cluster.links != base.links, is.movement == CollectiveMovement::kRing) << Name(is.kind);
    for (const CollectiveMeasurement& row : rows) {
      EXPECT_EQ(PredictCollective(fit->cluster, row)->duration_ns, row.duration_ns) << Name(is.kind);
    }
  }
}

// The cost model answers what was fitted, wherever the group lies: one rule places both.
TEST(ClusterFit, AnswersItsOwnRowsWhereverTheyLie) {
  Cluster base;
  base.ranks = 64;
  base.device.table_name = "x";
  base.links = {{.name = "inner", .latency_ns = Nanoseconds{10}, .bytes_per_second = 1'000'000'000},
                {.name = "outer", .latency_ns = Nanoseconds{10}, .bytes_per_second = 100'000'000}};
  std::vector<CollectiveMeasurement> rows;
  std::int64_t time = 1'000'000;
  for (const std::int64_t nodes : {1, 2, 4, 8}) {
    for (const std::int64_t in_node : {1, 2, 4, 8}) {
      if (nodes * in_node < 2) continue;
      for (const std::int64_t groups : {std::int64_t{1}, 8 / in_node}) {
        rows.push_back({"x", CollectiveKind::kAllReduce, groups, nodes * in_node, Bytes{1 << 24},
                        Nanoseconds{time += 1'000}, nodes});
        if (groups == 8 / in_node) break;
      }
    }
  }
  const Result<ClusterFit> fit = FitCluster(base, {.collectives = rows}, "");
  ASSERT_TRUE(fit.has_value());
  EXPECT_EQ(fit->cluster.collectives.size(), rows.size());
  for (const CollectiveMeasurement& row : rows) {
    const std::string where = std::to_string(row.ranks) + " of " + std::to_string(row.nodes);
    const Result<CollectiveCost> cost = PredictCollective(fit->cluster, row);
    ASSERT_TRUE(cost.has_value()) << where;
    EXPECT_EQ(cost->duration_ns, row.duration_ns) << where;
    // A plan's communicator that lies so finds the same.
    const std::int64_t in_node = row.ranks / row.nodes;
    if (row.concurrent_groups * in_node != 8) continue;
    Communicator communicator{.size = row.ranks, .stride = 1};
    if (in_node == 1) communicator.stride = 8;
    if (in_node > 1 && in_node < 8 && row.nodes > 1) {
      communicator.dims = {{.size = row.nodes, .stride = 8}, {.size = in_node, .stride = 1}};
    }
    const std::vector<GroupPlacement> placements = PlaceGroups(fit->cluster, communicator, 64);
    ASSERT_EQ(placements.size(), 1U) << where;
    const auto planned =
        MakeCostModel(fit->cluster)
            ->Collective({CollectiveKind::kAllReduce, row.ranks, placements, row.full_tensor_bytes});
    ASSERT_TRUE(planned.has_value()) << where;
    EXPECT_EQ(planned->duration_ns, row.duration_ns) << where;
  }
}

TEST(PlaceTable, IsWhereAPlansGroupsLie) {
  for (const std::int64_t in_node : {1, 4, 8, 72}) {
    Cluster cluster;
    cluster.ranks = 144;
    cluster.ranks_per_node = in_node;
    cluster.links.resize(2);
    for (std::int64_t ranks = 2; ranks <= 144; ++ranks) {
      if (ranks > in_node ? ranks % in_node != 0 : in_node % ranks != 0) continue;
      const std::int64_t groups = std::max<std::int64_t>(1, in_node / ranks);
      const std::int64_t world = ranks * groups;
      EXPECT_EQ(PlaceGroups(cluster, {.size = ranks}, world),
                std::vector<GroupPlacement>{PlaceTable(cluster, ranks, 0, groups)})
          << ranks << " ranks, " << in_node << " in a node";
    }
  }
}

}  // namespace
}  // namespace shardplan::test
