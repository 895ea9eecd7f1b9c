// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "documents/cluster_fields.h"
#include "documents/document_json.h"
#include "json/tables.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Cluster>();

namespace {

// Tables are interpolated: two points at one place have no line through them.
template <typename Point, typename PlaceOf>
Status CheckAscending(const std::vector<Point>& points, const std::string& pointer, std::string_view field,
                      PlaceOf place_of) {
  for (std::size_t p = 1; p < points.size(); ++p) {
    const std::int64_t before = place_of(points[p - 1]);
    const std::int64_t here = place_of(points[p]);
    if (here > before) continue;
    return MakeInputError(fmt::format("{}/{}/{}", pointer, p, field),
                          "the points of a table have to ascend, each of them once", fmt::format("{}", here),
                          fmt::format("more than {}, which the point before has", before));
  }
  return {};
}

Status CheckRate(const ComputeRate& rate, const std::string& pointer) {
  Status status = CheckAscending(rate.efficiency, pointer + "/efficiency", "flops",
                                 [](const EfficiencyPoint& point) { return point.flops; });
  if (!status) return status;
  const std::string shapes = pointer + "/shapes";
  status = CheckAscending(rate.shapes, shapes, "output_elements",
                          [](const MatmulRow& row) { return row.output_elements; });
  for (std::size_t r = 0; status && r < rate.shapes.size(); ++r) {
    const std::string points = fmt::format("{}/{}/points", shapes, r);
    if (rate.shapes[r].points.empty()) {
      return MakeInputError(points, "a row of shapes needs a point", "none", "1 or more");
    }
    status = CheckAscending(rate.shapes[r].points, points, "inner",
                            [](const MatmulPoint& point) { return point.inner; });
  }
  return status;
}

}  // namespace

Status CheckCluster(const Cluster& cluster, const std::string& pointer) {
  const Device& device = cluster.device;
  for (const auto& [name, rates] : {std::pair{"matmul", &device.matmul},
                                    {"attention", &device.attention},
                                    {"attention_backward", &device.attention_backward}}) {
    for (std::size_t r = 0; r < rates->size(); ++r) {
      Status status = CheckRate((*rates)[r], fmt::format("{}/device/{}/{}", pointer, name, r));
      if (!status) return status;
    }
  }
  if (Status status =
          CheckAscending(device.memory_efficiency, pointer + "/device/memory_efficiency", "moved_bytes",
                         [](const BandwidthPoint& point) { return point.moved_bytes.value; });
      !status)
    return status;
  for (std::size_t i = 0; i < cluster.sources.size(); ++i) {
    for (std::size_t before = 0; before < i; ++before) {
      if (cluster.sources[before].figure != cluster.sources[i].figure) continue;
      return MakeInputError(fmt::format("{}/sources/{}/figure", pointer, i),
                            "the source of a figure is said twice",
                            std::string(Name(cluster.sources[i].figure)), "each figure once");
    }
  }
  for (std::size_t t = 0; t < cluster.collectives.size(); ++t) {
    Status status = CheckAscending(
        cluster.collectives[t].points, fmt::format("{}/collectives/{}/points", pointer, t),
        "full_tensor_bytes", [](const CollectivePoint& point) { return point.full_tensor_bytes.value; });
    if (!status) return status;
  }
  return {};
}

Result<Cluster> ClusterFromTape(const JsonTape& tape) {
  Result<Cluster> cluster = ReadDocumentAs<Cluster>(tape, kClusterSchema);
  if (!cluster.has_value()) return cluster;
  if (Status status = CheckCluster(*cluster, ""); !status) return std::unexpected(status.error());
  return cluster;
}

std::string ToJson(const Cluster& cluster) {
  JsonWriter writer;
  writer.WriteDocument(kClusterSchema, cluster);
  return writer.Take();
}

}  // namespace shardplan
