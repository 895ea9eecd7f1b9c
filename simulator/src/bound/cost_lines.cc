// SPDX-License-Identifier: Apache-2.0
#include "bound/cost_lines.h"

#include <algorithm>
#include <vector>

namespace shardplan::internal {
namespace {

struct CostPoint {
  std::int64_t bytes = 0;
  std::int64_t least_ns = 0;
};

// A stretch between two sizes is so many times shorter than what is below it.
constexpr std::int64_t kStretch = 512;

std::vector<std::int64_t> SizesToAsk(const Cluster& cluster, std::int64_t least_bytes,
                                     std::int64_t most_bytes) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = least_bytes; size < most_bytes; size += size / kStretch + 1) sizes.push_back(size);
  for (const CollectiveTable& table : cluster.collectives) {
    for (const CollectivePoint& point : table.points) {
      const std::int64_t size = point.full_tensor_bytes.value;
      if (size >= least_bytes && size < most_bytes) sizes.push_back(size);
    }
  }
  sizes.push_back(most_bytes);
  std::ranges::sort(sizes);
  const auto repeated = std::ranges::unique(sizes);
  sizes.erase(repeated.begin(), repeated.end());
  return sizes;
}

// Points that a line has to pass below to be below the work on a link everywhere.
std::vector<CostPoint> PointsBelow(const std::vector<std::int64_t>& sizes,
                                   const std::vector<CollectiveCost>& costs, std::size_t link) {
  const auto work = [&](std::size_t a, std::size_t b) {
    const Int128 ns = std::min(costs[a].duration_ns, costs[b].duration_ns).value;
    const Int128 done = ns * std::min(costs[a].loads.ppm[link], costs[b].loads.ppm[link]) / 1'000'000;
    return std::max<std::int64_t>(0, static_cast<std::int64_t>(done) - 2);
  };
  std::vector<CostPoint> points = {{sizes.front(), work(0, 0)}};
  for (std::size_t i = 1; i < sizes.size(); ++i) points.push_back({sizes[i], work(i - 1, i)});
  return points;
}

// The lower convex hull: no point is below it.
std::vector<CostPoint> HullOf(const std::vector<CostPoint>& points) {
  std::vector<CostPoint> hull;
  const auto above = [](const CostPoint& a, const CostPoint& b, const CostPoint& c) {
    return Int128{b.least_ns - a.least_ns} * (c.bytes - a.bytes) >=
           Int128{c.least_ns - a.least_ns} * (b.bytes - a.bytes);
  };
  for (const CostPoint& point : points) {
    while (hull.size() > 1 && above(hull[hull.size() - 2], hull.back(), point)) hull.pop_back();
    hull.push_back(point);
  }
  return hull;
}

// The hull's edge at the size of a unit among many; where that begins below zero, the steepest line through
// the origin. The slope is rounded down, and up where it takes from the begin.
void SetLine(const std::vector<CostPoint>& points, std::int64_t usual_bytes, CostLine& line) {
  constexpr std::int64_t kUnits = 128;
  const std::vector<CostPoint> hull = HullOf(points);
  const std::int64_t of_a_unit = usual_bytes / kUnits;
  std::size_t end = 1;
  while (end + 1 < hull.size() && hull[end].bytes < of_a_unit) ++end;
  const CostPoint &from = hull[end - 1], &to = hull[end];
  const Int128 rise = Int128{to.least_ns - from.least_ns} * kSlopeScale;
  const Int128 slope = std::max<Int128>(rise / (to.bytes - from.bytes), 0);
  const Int128 begin = Int128{from.least_ns} * kSlopeScale - (slope + 1) * from.bytes;
  Int128 from_origin = Int128{points.back().least_ns} * kSlopeScale / points.back().bytes;
  for (const CostPoint& point : points)
    from_origin = std::min(from_origin, Int128{point.least_ns} * kSlopeScale / point.bytes);
  line.fixed_ns = begin < 0 ? 0 : static_cast<std::int64_t>(begin / kSlopeScale);
  line.per_byte = static_cast<std::int64_t>(begin < 0 ? from_origin : slope);
}

// Empty: not on this communicator, or there is no cost.
std::vector<CollectiveCost> CostsOf(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                                    const Communicator& communicator, std::int64_t world_size,
                                    const std::vector<std::int64_t>& sizes) {
  if (communicator.size <= 1 || RanksSpanned(communicator) > kMaxRanks) return {};
  const std::vector<GroupPlacement> placements = PlaceGroups(cluster, communicator, world_size);
  CollectiveRequest request{.kind = kind, .ranks = communicator.size, .placements = placements};
  std::vector<CollectiveCost> of_sizes;
  for (const std::int64_t size : sizes) {
    request.full_tensor_bytes = {size};
    Result<CollectiveCost> cost = costs.Collective(request);
    if (!cost) return {};
    of_sizes.push_back(*std::move(cost));
  }
  return of_sizes;
}

}  // namespace

CostLines LinesBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                     const Communicator& communicator, std::int64_t world_size, const CollectiveSizes& of) {
  CostLines lines;
  const std::vector<std::int64_t> sizes = SizesToAsk(cluster, 1, std::max<std::int64_t>(2, of.most_bytes));
  const std::vector<CollectiveCost> of_sizes = CostsOf(costs, cluster, kind, communicator, world_size, sizes);
  if (of_sizes.empty()) return lines;
  for (std::size_t l = 0; l < lines.size(); ++l)
    SetLine(PointsBelow(sizes, of_sizes, l), of.usual_bytes, lines[l]);
  return lines;
}

std::int64_t SlopeBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                        const Communicator& communicator, std::int64_t world_size, std::int64_t least_bytes,
                        std::int64_t most_bytes) {
  const std::vector<std::int64_t> sizes =
      SizesToAsk(cluster, least_bytes, std::max(least_bytes + 1, most_bytes));
  const std::vector<CollectiveCost> of_sizes = CostsOf(costs, cluster, kind, communicator, world_size, sizes);
  if (of_sizes.empty()) return 0;
  const auto slope = [&](std::int64_t ns, std::int64_t bytes) {
    return std::max<Int128>(0, Int128{ns - 1} * kSlopeScale / bytes);
  };
  Int128 least = slope(of_sizes.front().duration_ns.value, sizes.front());
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    const Nanoseconds ns = std::min(of_sizes[i - 1].duration_ns, of_sizes[i].duration_ns);
    least = std::min(least, slope(ns.value, sizes[i]));
  }
  return static_cast<std::int64_t>(std::min<Int128>(least, Int128{1} << 62));
}

Result<CollectiveCost> CostOfTraced(const CostModel& costs, const Cluster& cluster, const Communicator& group,
                                    std::int64_t world_size, const ModelCollective& collective, Bytes size) {
  if (RanksSpanned(group) > kMaxRanks) return MakeInputError("/communicators", "too many ranks", group.name);
  const std::vector<GroupPlacement> placements = PlaceGroups(cluster, group, world_size);
  return costs.Collective({.kind = collective.kind,
                           .ranks = group.size,
                           .placements = placements,
                           .full_tensor_bytes = size,
                           .busiest_ppm = collective.busiest_ppm});
}

// A size at which no kernel is as short as the overhead of one, and rounding is nothing.
std::int64_t CopySlope(const CostModel& costs) {
  constexpr std::int64_t kManyBytes = std::int64_t{1} << 40;
  const std::int64_t time_ns = costs.DeviceCopy({kManyBytes}, {0}).value - 1;
  return time_ns <= 0 ? 0 : static_cast<std::int64_t>(Int128{time_ns} * kSlopeScale / kManyBytes);
}

}  // namespace shardplan::internal
