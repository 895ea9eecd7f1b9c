// SPDX-License-Identifier: Apache-2.0
// Neighbours in ascending tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardplan::internal {

// First and last of the two points of `points` that enclose `position`, which is strictly inside the table.
template <typename Point, typename Projection>
std::pair<const Point*, const Point*> Enclosing(const std::vector<Point>& points, std::int64_t position,
                                                Projection projection) {
  const auto upper =
      std::upper_bound(points.begin(), points.end(), position,
                       [&](std::int64_t value, const Point& point) { return value < projection(point); });
  return {&*(upper - 1), &*upper};
}

}  // namespace shardplan::internal
