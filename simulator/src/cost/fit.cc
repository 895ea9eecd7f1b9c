// SPDX-License-Identifier: Apache-2.0
// What is fitted to tables of measurements.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "cost/fixed_log.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/measurements.h"

namespace shardplan {
namespace {

constexpr Bytes kSteadyFrom{std::int64_t{16} << 20};
constexpr std::int64_t kPpm = 1'000'000;

std::int64_t Median(std::vector<std::int64_t> values) {
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : internal::MulDiv(values[half - 1] + values[half], 1, 2);
}

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
    while (pools.size() > 1 && Median(pools[pools.size() - 2].samples) > Median(pools.back().samples)) {
      Pool last = std::move(pools.back());
      pools.pop_back();
      std::ranges::copy(last.sizes, std::back_inserter(pools.back().sizes));
      std::ranges::copy(last.samples, std::back_inserter(pools.back().samples));
    }
  }
  std::vector<CollectivePoint> points;
  for (const Pool& pool : pools) {
    for (const Bytes size : pool.sizes) points.push_back({size, {Median(pool.samples)}});
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
  if (!off.empty()) table.scatter_ppm = Median(off);
  // A slow outlier just below does not lift what is steady.
  const auto steady = samples.lower_bound(kSteadyFrom);
  if (steady != samples.end()) {
    const Nanoseconds first{Median(steady->second)};
    for (CollectivePoint& point : table.points) point.duration_ns = std::min(point.duration_ns, first);
  }
  for (auto it = steady; it != samples.end(); ++it) {
    Nanoseconds duration{Median(it->second)};
    if (!table.points.empty()) duration = std::max(duration, table.points.back().duration_ns);
    table.points.push_back({it->first, duration});
  }
}

// The grid of shapes: measured cells, and a guess for the others from those around them.
class ShapeGrid {
 public:
  explicit ShapeGrid(std::span<const MatmulMeasurement> rows) {
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::int64_t>> cells;
    for (const MatmulMeasurement& row : rows) {
      cells[{row.batch * row.m * row.n, row.k}].push_back(row.duration_ns.value);
    }
    for (const auto& [place, samples] : cells) {
      rows_[place.first][place.second] = Median(samples);
      columns_[place.second][place.first] = Median(samples);
    }
  }

  std::vector<MatmulRow> Rows() const {
    std::vector<MatmulRow> made;
    for (const auto& [output_elements, row] : rows_) {
      MatmulRow one{.output_elements = output_elements};
      for (const auto& [inner, column] : columns_) {
        if (const std::optional<std::int64_t> duration = At(output_elements, inner))
          one.points.push_back({inner, {*duration}});
      }
      made.push_back(std::move(one));
    }
    return made;
  }

 private:
  using Line = std::map<std::int64_t, std::int64_t>;  // duration by place

  // On the line through the neighbours; only between two, unless `beyond`.
  static std::optional<std::int64_t> Guess(const Line& line, std::int64_t place, bool beyond) {
    if (line.size() < 2) return std::nullopt;
    auto high = line.upper_bound(place);
    if (!beyond && (high == line.end() || high == line.begin())) return std::nullopt;
    if (high == line.end()) --high;
    if (high == line.begin()) ++high;
    const auto low = std::prev(high);
    const std::int64_t guess = low->second + internal::MulDiv(high->second - low->second, place - low->first,
                                                              high->first - low->first);
    // A line through two points that are near can miss by far: not below half of the nearest.
    return std::max(guess, std::min(low->second, high->second) / 2);
  }

  std::optional<std::int64_t> At(std::int64_t output_elements, std::int64_t inner) const {
    const Line& row = rows_.at(output_elements);
    const Line& column = columns_.at(inner);
    if (const auto measured = row.find(inner); measured != row.end()) return measured->second;
    const auto in_row = Guess(row, inner, false);
    const auto in_column = Guess(column, output_elements, false);
    if (in_row && in_column) {  // the geometric mean
      return std::llround(std::sqrt(static_cast<double>(*in_row) * static_cast<double>(*in_column)));
    }
    if (in_row) return in_row;
    if (in_column) return in_column;
    if (const auto beyond = Guess(row, inner, true)) return beyond;
    return Guess(column, output_elements, true);
  }

  std::map<std::int64_t, Line> rows_;     // by output elements
  std::map<std::int64_t, Line> columns_;  // by inner dimension
};

// Bytes that a rank sends in a second at the end of a table, where latency no longer counts.
std::int64_t RateAtTheEnd(const CollectiveTable& table) {
  if (table.points.size() < 2) return 0;
  const CollectivePoint& last = table.points.back();
  const CollectivePoint& before = table.points[table.points.size() - 2];
  const std::int64_t time = (last.duration_ns - before.duration_ns).value;
  if (time <= 0) return 0;
  const std::int64_t bytes = (last.full_tensor_bytes - before.full_tensor_bytes).value;
  const bool reduces = table.kind == CollectiveKind::kAllReduce;
  const std::int64_t moved =
      internal::MulDiv(bytes, reduces ? table.ranks + 1 : table.ranks - 1, table.ranks);
  return internal::MulDiv(moved, 1'000'000'000, time);
}

// Of all numbers of ranks the largest is nearest to what nobody measured. The latency of a step is what small
// tensors take more with more ranks, whatever protocol they take, and the rest is paid once.
void FitInnerLink(Cluster& cluster) {
  std::int64_t most = 0;
  for (const CollectiveTable& table : cluster.collectives) most = std::max(most, table.ranks);
  std::vector<std::int64_t> rates, steps, once;
  std::int64_t nvls = 0;
  for (const CollectiveTable& table : cluster.collectives) {
    if (table.kind == CollectiveKind::kAllReduce) {
      if (table.ranks == most) nvls = RateAtTheEnd(table);
      continue;
    }
    if (table.ranks == most) rates.push_back(RateAtTheEnd(table));
    for (const CollectiveTable& other : cluster.collectives) {
      if (other.kind != table.kind || other.ranks >= table.ranks) continue;
      const std::int64_t more =
          table.points.front().duration_ns.value - other.points.front().duration_ns.value;
      steps.push_back(std::max<std::int64_t>(0, more / (table.ranks - other.ranks)));
    }
  }
  Link& link = cluster.links[0];
  std::erase(rates, 0);
  if (rates.empty()) return;
  link.bytes_per_second = Median(rates);
  if (!steps.empty()) {
    link.latency_ns = {Median(steps)};
    for (LinkProtocol& protocol : link.protocols)
      protocol.latency_ns = std::max(protocol.latency_ns, link.latency_ns);
    for (const CollectiveTable& table : cluster.collectives) {
      if (table.kind == CollectiveKind::kAllReduce) continue;
      once.push_back(std::max<std::int64_t>(
          0, table.points.front().duration_ns.value - link.latency_ns.value * (table.ranks - 1)));
    }
    link.base_latency_ns = {Median(once)};
  }
  const auto has_nvls =
      std::ranges::find(link.algorithms, CollectiveAlgorithm::kNvls) != link.algorithms.end();
  if (has_nvls && nvls > 0)
    link.nvls_rate_ppm =
        std::clamp<std::int64_t>(internal::MulDiv(nvls, kPpm, link.bytes_per_second), 1, kPpm);
}

}  // namespace

std::vector<CollectiveTable> FitCollectiveTables(std::span<const CollectiveMeasurement> rows,
                                                 const std::string& link, const std::string& source) {
  using Group = std::tuple<CollectiveKind, std::int64_t, std::int64_t>;
  std::vector<CollectiveTable> tables;
  std::vector<SamplesBySize> samples;
  std::map<Group, std::size_t> index_of;
  for (const CollectiveMeasurement& row : rows) {
    const auto [it, added] =
        index_of.try_emplace(Group{row.kind, row.ranks, row.concurrent_groups}, tables.size());
    if (added) {
      tables.push_back({.kind = row.kind,
                        .ranks = row.ranks,
                        .concurrent_groups = row.concurrent_groups,
                        .link = link,
                        .points = {},
                        .source = source});
      samples.emplace_back();
    }
    samples[it->second][row.full_tensor_bytes].push_back(row.duration_ns.value);
  }
  for (std::size_t t = 0; t < tables.size(); ++t) FitPoints(samples[t], tables[t]);
  return tables;
}

std::vector<MatmulRow> FitMatmulShapes(std::span<const MatmulMeasurement> rows) {
  std::vector<MatmulRow> shapes = ShapeGrid(rows).Rows();
  std::erase_if(shapes, [](const MatmulRow& row) { return row.points.empty(); });
  return shapes;
}

Cluster FitCluster(Cluster base, const Measurements& measurements, const std::string& source) {
  std::vector<CollectiveMeasurement> collectives;
  for (const CollectiveMeasurement& row : measurements.collectives) {
    if (row.device == base.device.table_name) collectives.push_back(row);
  }
  if (!collectives.empty() && !base.links.empty()) {
    base.collectives = FitCollectiveTables(collectives, base.links[0].name, source);
    FitInnerLink(base);
  }
  for (ComputeRate& rate : base.device.matmul) {
    // Nobody measured float16: its peak is bfloat16's.
    const DType measured = rate.dtype == DType::kFloat16 ? DType::kBFloat16 : rate.dtype;
    std::vector<MatmulMeasurement> matmuls;
    for (const MatmulMeasurement& row : measurements.matmuls) {
      if (row.device == base.device.table_name && row.dtype == measured) matmuls.push_back(row);
    }
    if (!matmuls.empty()) rate.shapes = FitMatmulShapes(matmuls);
  }
  return base;
}

}  // namespace shardplan
