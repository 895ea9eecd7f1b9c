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

std::vector<std::int64_t> SizesToAsk(const Cluster& cluster, std::int64_t most_bytes) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size < most_bytes; size += size / kStretch + 1) sizes.push_back(size);
  for (const CollectiveTable& table : cluster.collectives) {
    for (const CollectivePoint& point : table.points) {
      const std::int64_t size = point.full_tensor_bytes.value;
      if (size >= 1 && size < most_bytes) sizes.push_back(size);
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

// The line through the last point that passes below all others; where that would begin below zero, the
// steepest one through the origin.
void SetLine(const std::vector<CostPoint>& points, CostLine& line) {
  const CostPoint& last = points.back();
  Int128 slope = 0;
  Int128 from_origin = Int128{last.least_ns} * kSlopeScale / last.bytes;
  for (const CostPoint& point : points) {
    from_origin = std::min(from_origin, Int128{point.least_ns} * kSlopeScale / point.bytes);
    if (point.bytes == last.bytes) continue;
    const Int128 rise = Int128{last.least_ns} - point.least_ns;
    const Int128 run = Int128{last.bytes} - point.bytes;
    if (rise > 0) slope = std::max(slope, rise * kSlopeScale / run + 1);
  }
  const Int128 begin = Int128{last.least_ns} * kSlopeScale - slope * last.bytes;
  line.fixed_ns = begin < 0 ? 0 : static_cast<std::int64_t>(begin / kSlopeScale);
  line.per_byte = static_cast<std::int64_t>(begin < 0 ? from_origin : slope);
}

}  // namespace

CostLines LinesBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                     const Communicator& communicator, std::int64_t world_size, std::int64_t most_bytes) {
  CostLines lines;
  if (communicator.size <= 1 || RanksSpanned(communicator) > kMaxRanks) return lines;
  const std::vector<GroupPlacement> placements = PlaceGroups(cluster, communicator, world_size);
  CollectiveRequest request{.kind = kind, .ranks = communicator.size, .placements = placements};
  const std::vector<std::int64_t> sizes = SizesToAsk(cluster, std::max<std::int64_t>(2, most_bytes));
  std::vector<CollectiveCost> of_sizes;
  for (const std::int64_t size : sizes) {
    request.full_tensor_bytes = {size};
    Result<CollectiveCost> cost = costs.Collective(request);
    if (!cost) return lines;
    of_sizes.push_back(*std::move(cost));
  }
  for (std::size_t l = 0; l < lines.size(); ++l) SetLine(PointsBelow(sizes, of_sizes, l), lines[l]);
  return lines;
}

// A size at which no kernel is as short as the overhead of one, and rounding is nothing.
std::int64_t CopySlope(const CostModel& costs) {
  constexpr std::int64_t kManyBytes = std::int64_t{1} << 40;
  const std::int64_t time_ns = costs.DeviceCopy({kManyBytes}, {0}).value - 1;
  return time_ns <= 0 ? 0 : static_cast<std::int64_t>(Int128{time_ns} * kSlopeScale / kManyBytes);
}

}  // namespace shardplan::internal
