// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/measurements.h"

#include <gtest/gtest.h>

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

TEST(Measurements, SayWhatIsWrongAndWhere) {
  const auto error_of = [](const std::string& text) {
    const auto read = ParseMeasurements(text);
    EXPECT_FALSE(read.has_value()) << text;
    return read ? Error{} : read.error();
  };
  const std::string head(kHead);
  EXPECT_EQ(error_of("").pointer, "/line/1");
  EXPECT_EQ(error_of("device,ranks\n").pointer, "/line/1");
  const Error kind = error_of(head + "d,all-gather,1,2,1024,9\nd,all-to-all,1,2,1024,9\n");
  EXPECT_EQ(kind.pointer, "/line/3");
  EXPECT_EQ(kind.found, "all-to-all");
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
  const auto tables = FitCollectiveTables(rows, "nvlink", "here");
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
  const auto tables = FitCollectiveTables(rows, "", "");
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
  const Cluster fitted = FitCluster(base, measured, "here");
  EXPECT_EQ(fitted.collectives.size(), 2U);
  EXPECT_EQ(fitted.links[0].bytes_per_second, 2'000'000'000);
  EXPECT_NEAR(static_cast<double>(fitted.links[0].latency_ns.value), 500,
              130);  // and some of the 1,000 bytes
  EXPECT_LE(fitted.links[0].base_latency_ns.value, 250);
  EXPECT_EQ(fitted.device.matmul[0].shapes.size(), 1U);  // float16 has bfloat16's
  EXPECT_TRUE(fitted.device.matmul[1].shapes.empty());
}

}  // namespace
}  // namespace shardplan::test
