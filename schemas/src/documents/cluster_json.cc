#include <fmt/format.h>

#include "documents/cluster_fields.h"
#include "documents/document_json.h"
#include "json/json_writer.h"
#include "shardplan/schemas/cluster_check.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
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

}  // namespace

Status CheckCluster(const Cluster& cluster, const std::string& pointer) {
  for (std::size_t r = 0; r < cluster.device.matmul.size(); ++r) {
    Status status = CheckAscending(cluster.device.matmul[r].efficiency,
                                   fmt::format("{}/device/matmul/{}/efficiency", pointer, r), "flops",
                                   [](const EfficiencyPoint& point) { return point.flops; });
    if (!status) return status;
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
