// SPDX-License-Identifier: Apache-2.0
// Fits to tables of measurements.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "cost/fixed_log.h"
#include "cost/median.h"
#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/measurements.h"

namespace shardplan {
namespace {

constexpr Bytes kSteadyFrom{std::int64_t{16} << 20};
constexpr std::int64_t kPpm = 1'000'000;

using SamplesBySize = std::map<Bytes, std::vector<std::int64_t>>;

// Adjacent sizes whose medians fall are pooled, until none do.
std::vector<CollectivePoint> PoolViolators(const SamplesBySize& samples, Bytes below) {
  struct Pool {
    std::vector<Bytes> sizes;
    std::vector<std::int64_t> samples;
  };
  std::vector<Pool> pools;
  for (const auto& [size, here] : samples) {
    if (size >= below) break;
    pools.push_back({{size}, here});
    while (pools.size() > 1 &&
           internal::Median(pools[pools.size() - 2].samples) > internal::Median(pools.back().samples)) {
      Pool last = std::move(pools.back());
      pools.pop_back();
      std::ranges::copy(last.sizes, std::back_inserter(pools.back().sizes));
      std::ranges::copy(last.samples, std::back_inserter(pools.back().samples));
    }
  }
  std::vector<CollectivePoint> points;
  for (const Pool& pool : pools) {
    for (const Bytes size : pool.sizes) points.push_back({size, {internal::Median(pool.samples)}});
  }
  return points;
}

void FitPoints(const SamplesBySize& samples, CollectiveTable& table) {
  table.points = PoolViolators(samples, kSteadyFrom);
  std::vector<std::int64_t> off;
  for (const CollectivePoint& point : table.points) {
    for (const std::int64_t sample : samples.at(point.full_tensor_bytes)) {
      off.push_back(internal::MulDiv(std::abs(sample - point.duration_ns.value), kPpm,
                                     std::max<std::int64_t>(1, point.duration_ns.value)));
    }
  }
  if (!off.empty()) table.scatter_ppm = internal::Median(off);
  // A slow outlier just below does not lift what is steady.
  const auto steady = samples.lower_bound(kSteadyFrom);
  if (steady != samples.end()) {
    const Nanoseconds first{internal::Median(steady->second)};
    for (CollectivePoint& point : table.points) point.duration_ns = std::min(point.duration_ns, first);
  }
  for (auto it = steady; it != samples.end(); ++it) {
    Nanoseconds duration{internal::Median(it->second)};
    if (!table.points.empty()) duration = std::max(duration, table.points.back().duration_ns);
    table.points.push_back({it->first, duration});
  }
}

// Bytes that a rank sends in a second at the end of a table, where latency no longer counts.
std::int64_t RateAtTheEnd(const CollectiveTable& table) {
  if (table.points.size() < 2) return 0;
  const CollectivePoint& last = table.points.back();
  const CollectivePoint& before = table.points[table.points.size() - 2];
  const std::int64_t time = (last.duration_ns - before.duration_ns).value;
  if (time <= 0) return 0;
  const std::int64_t bytes = (last.full_tensor_bytes - before.full_tensor_bytes).value;
  // A switch that reduces lets each rank send the tensor and its part of the result.
  const bool reduces = DescriptionOf(table.kind).movement == CollectiveMovement::kRingTwice;
  const std::int64_t moved =
      internal::MulDiv(bytes, reduces ? table.ranks + 1 : table.ranks - 1, table.ranks);
  return internal::MulDiv(moved, 1'000'000'000, time);
}

// Kinds that say what the links do: rings. The others are answered by their own tables.
bool SaysLink(CollectiveKind kind) {
  const CollectiveMovement movement = DescriptionOf(kind).movement;
  return movement == CollectiveMovement::kRing || movement == CollectiveMovement::kRingTwice;
}

std::vector<CollectiveTable> RingsInsideNodes(const Cluster& cluster) {
  std::vector<CollectiveTable> tables;
  for (const CollectiveTable& table : cluster.collectives) {
    if (SaysLink(table.kind) && table.link == cluster.links[0].name && table.ranks > 1 &&
        !table.points.empty())
      tables.push_back(table);
  }
  return tables;
}

// The largest number of ranks is nearest to those that nobody measured. The latency of a step is what small
// tensors take more with more ranks, whatever protocol they take, and the rest is paid once.
void FitInnerLink(Cluster& cluster) {
  const std::vector<CollectiveTable> tables = RingsInsideNodes(cluster);
  std::int64_t most = 0;
  for (const CollectiveTable& table : tables) most = std::max(most, table.ranks);
  std::vector<std::int64_t> rates, steps, once;
  std::int64_t nvls = 0;
  for (const CollectiveTable& table : tables) {
    if (table.kind == CollectiveKind::kAllReduce) {
      if (table.ranks == most) nvls = RateAtTheEnd(table);
      continue;
    }
    if (table.ranks == most) rates.push_back(RateAtTheEnd(table));
    for (const CollectiveTable& other : tables) {
      if (other.kind != table.kind || other.ranks >= table.ranks) continue;
      const std::int64_t more =
          table.points.front().duration_ns.value - other.points.front().duration_ns.value;
      steps.push_back(std::max<std::int64_t>(0, more / (table.ranks - other.ranks)));
    }
  }
  Link& link = cluster.links[0];
  std::erase(rates, 0);
  if (rates.empty()) return;
  link.bytes_per_second = internal::Median(rates);
  if (!steps.empty()) {
    link.latency_ns = {internal::Median(steps)};
    for (LinkProtocol& protocol : link.protocols)
      protocol.latency_ns = std::max(protocol.latency_ns, link.latency_ns);
    for (const CollectiveTable& table : tables) {
      if (table.kind == CollectiveKind::kAllReduce) continue;
      once.push_back(std::max<std::int64_t>(
          0, table.points.front().duration_ns.value - link.latency_ns.value * (table.ranks - 1)));
    }
    link.base_latency_ns = {internal::Median(once)};
  }
  const auto has_nvls =
      std::ranges::find(link.algorithms, CollectiveAlgorithm::kNvls) != link.algorithms.end();
  if (has_nvls && nvls > 0)
    link.nvls_rate_ppm =
        std::clamp<std::int64_t>(internal::MulDiv(nvls, kPpm, link.bytes_per_second), 1, kPpm);
}

// Whether the cost model asks both tables the same.
bool AnswersTheSame(const Cluster& cluster, const CollectiveTable& a, const CollectiveTable& b) {
  const auto place_of = [&](const CollectiveTable& table) {
    return PlaceTable(cluster, table.ranks, table.nodes, table.concurrent_groups);
  };
  return a.kind == b.kind && a.ranks == b.ranks && a.link == b.link && place_of(a) == place_of(b);
}

std::string TableText(const CollectiveTable& table) {
  std::string text = fmt::format("{} on {} ranks", Name(table.kind), table.ranks);
  if (table.nodes > 1) text += fmt::format(" of {} nodes", table.nodes);
  if (table.concurrent_groups > 1) text += fmt::format(", {} groups at once", table.concurrent_groups);
  return text + fmt::format(" ({})", table.link);
}

// Takes the rows of one device; makes the lines about what they changed.
class Fit {
 public:
  Fit(Cluster base, std::string device) : made_{.cluster = std::move(base)}, device_(std::move(device)) {}

  Result<ClusterFit> Run(const Measurements& measurements, const std::string& source) {
    const auto collectives = Taken(measurements.collectives);
    const auto matmuls = Taken(measurements.matmuls);
    if (collectives.empty() && matmuls.empty()) return NothingTaken();
    FitCollectives(collectives, source);
    FitProducts(matmuls);
    for (const auto& [name, count] : others_)
      made_.passed_over.push_back(fmt::format("{} of device {}", Rows(count), name));
    if (!device_.empty() && made_.cluster.device.table_name != device_) {
      made_.changed.push_back(
          fmt::format("table_name: {}, was {}", device_, Or(made_.cluster.device.table_name, "none")));
      made_.cluster.device.table_name = device_;
    }
    return std::move(made_);
  }

 private:
  static std::string Rows(std::int64_t count) {
    return fmt::format("{} {}", count, count == 1 ? "row" : "rows");
  }
  static std::string Or(const std::string& name, const char* other) { return name.empty() ? other : name; }

  template <typename Row>
  std::vector<Row> Taken(const std::vector<Row>& rows) {
    std::vector<Row> taken;
    for (const Row& row : rows) {
      if (device_.empty() ? IsDevice(row.device, made_.cluster.device) : row.device == device_) {
        taken.push_back(row);
      } else {
        ++others_[row.device];
      }
    }
    return taken;
  }

  std::unexpected<Error> NothingTaken() const {
    std::vector<std::string> found;
    for (const auto& [name, count] : others_) found.push_back(name);
    const std::string base =
        device_.empty() ? Or(made_.cluster.device.table_name, "(a cluster without a table_name)") : device_;
    return std::unexpected(
        Error{.code = ErrorCode::kBadInput,
              .message = "no row is of the device that is fitted",
              .found = fmt::format("rows of {}", fmt::join(found, ", ")),
              .expected = fmt::format("rows of {}; --device takes those of another name", base)});
  }

  void FitCollectives(const std::vector<CollectiveMeasurement>& rows, const std::string& source) {
    Cluster& cluster = made_.cluster;
    std::map<std::string, std::int64_t> out;
    bool inside = false;
    std::int64_t most = 0;
    for (const CollectiveMeasurement& row : rows) {
      const GroupPlacement place = PlaceTable(cluster, row.ranks, row.nodes, row.concurrent_groups);
      if (LinkOf(place) >= cluster.links.size()) {
        ++out[fmt::format("{} nodes: the cluster has no link between nodes", place.nodes)];
      } else if (place.nodes == 1 && SaysLink(row.kind)) {
        inside = true;
        most = std::max(most, row.ranks);
      }
    }
    for (const auto& [why, count] : out)
      made_.passed_over.push_back(fmt::format("{} of {}", Rows(count), why));
    const std::vector<CollectiveTable> before = cluster.collectives;
    const std::vector<CollectiveTable> fitted = FitCollectiveTables(rows, cluster, source);
    for (const CollectiveTable& table : fitted) {
      const auto there = std::ranges::find_if(cluster.collectives, [&](const CollectiveTable& other) {
        return AnswersTheSame(cluster, table, other);
      });
      made_.changed.push_back(fmt::format("{}: {} {}", TableText(table), table.points.size(),
                                          there == cluster.collectives.end() ? "sizes, new" : "sizes"));
      if (there == cluster.collectives.end()) {
        cluster.collectives.push_back(table);
      } else {
        *there = table;
      }
    }
    for (const CollectiveTable& table : before) {
      if (std::ranges::none_of(
              fitted, [&](const CollectiveTable& other) { return AnswersTheSame(cluster, table, other); }))
        made_.stayed.push_back(TableText(table));
    }
    FitLink(inside, most);
  }

  // The link's figures are those of the largest number of ranks: others do not move them.
  void FitLink(bool inside, std::int64_t most) {
    Cluster& cluster = made_.cluster;
    if (cluster.links.empty()) return;
    const Link before = cluster.links[0];
    bool largest = inside;
    for (const CollectiveTable& table : RingsInsideNodes(cluster)) largest &= table.ranks <= most;
    if (largest) FitInnerLink(cluster);
    const Link& link = cluster.links[0];
    if (link == before) {
      made_.stayed.push_back(fmt::format("link {}", link.name));
    } else {
      made_.changed.push_back(fmt::format(
          "link {}: {:.1f} GB/s, {:.1f} us a step and {:.1f} us once, were {:.1f}, {:.1f} and {:.1f}",
          link.name, Giga(link.bytes_per_second), Micro(link.latency_ns), Micro(link.base_latency_ns),
          Giga(before.bytes_per_second), Micro(before.latency_ns), Micro(before.base_latency_ns)));
    }
    for (std::size_t l = 1; l < cluster.links.size(); ++l)
      made_.stayed.push_back(fmt::format("link {}", cluster.links[l].name));
  }

  static double Giga(std::int64_t value) { return static_cast<double>(value) / 1e9; }
  static double Micro(Nanoseconds value) { return static_cast<double>(value.value) / 1e3; }

  void FitProducts(const std::vector<MatmulMeasurement>& rows) {
    std::set<DType> read;
    for (ComputeRate& rate : made_.cluster.device.matmul) {
      // Nobody measured float16: its peak is bfloat16's.
      const auto of = [&](DType dtype) {
        std::vector<MatmulMeasurement> matching;
        std::ranges::copy_if(rows, std::back_inserter(matching),
                             [&](const MatmulMeasurement& row) { return row.dtype == dtype; });
        return matching;
      };
      DType measured = rate.dtype;
      std::vector<MatmulMeasurement> matching = of(measured);
      if (matching.empty() && rate.dtype == DType::kFloat16) matching = of(measured = DType::kBFloat16);
      if (matching.empty()) {
        made_.stayed.push_back(fmt::format("products in {}", Name(rate.dtype)));
        continue;
      }
      read.insert(measured);
      rate.shapes = FitMatmulShapes(matching);
      made_.changed.push_back(
          fmt::format("products in {}: {} shapes{}", Name(rate.dtype), matching.size(),
                      measured == rate.dtype ? "" : fmt::format(", those of {}", Name(measured))));
    }
    std::map<std::string_view, std::int64_t> unread;
    for (const MatmulMeasurement& row : rows) {
      if (!read.contains(row.dtype)) ++unread[Name(row.dtype)];
    }
    for (const auto& [dtype, count] : unread) {
      made_.passed_over.push_back(
          fmt::format("{} of products in {}, of which the cluster has no rate", Rows(count), dtype));
    }
  }

  ClusterFit made_;
  const std::string device_;
  std::map<std::string, std::int64_t> others_;  // rows by device
};

}  // namespace

std::vector<CollectiveTable> FitCollectiveTables(std::span<const CollectiveMeasurement> rows,
                                                 const Cluster& cluster, const std::string& source) {
  std::vector<CollectiveTable> tables;
  std::vector<SamplesBySize> samples;
  for (const CollectiveMeasurement& row : rows) {
    const GroupPlacement place = PlaceTable(cluster, row.ranks, row.nodes, row.concurrent_groups);
    if (!cluster.links.empty() && LinkOf(place) >= cluster.links.size()) continue;
    CollectiveTable table{.kind = row.kind,
                          .ranks = row.ranks,
                          .concurrent_groups = place.concurrent_groups,
                          .link = cluster.links.empty() ? "" : cluster.links[LinkOf(place)].name,
                          .nodes = place.nodes > 1 ? place.nodes : 0,
                          .points = {},
                          .source = source};
    auto there = std::ranges::find_if(
        tables, [&](const CollectiveTable& other) { return AnswersTheSame(cluster, table, other); });
    if (there == tables.end()) {
      samples.emplace_back();
      tables.push_back(std::move(table));
      there = std::prev(tables.end());
    }
    samples[static_cast<std::size_t>(there - tables.begin())][row.full_tensor_bytes].push_back(
        row.duration_ns.value);
  }
  for (std::size_t t = 0; t < tables.size(); ++t) FitPoints(samples[t], tables[t]);
  return tables;
}

Result<ClusterFit> FitCluster(Cluster base, const Measurements& measurements, const std::string& source,
                              const std::string& device) {
  return Fit(std::move(base), device).Run(measurements, source);
}

}  // namespace shardplan
