// SPDX-License-Identifier: Apache-2.0
// Coordinates of ranks on the mesh of a layout.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/checkpoints/reshard.h"

namespace shardplan {

// -1 where the mesh has no such dimension.
inline std::int64_t FindMeshDim(const StateLayout& layout, std::string_view name) {
  for (std::size_t d = 0; d < layout.mesh.size(); ++d) {
    if (layout.mesh[d].name == name) return static_cast<std::int64_t>(d);
  }
  return -1;
}

inline std::int64_t SizeAlong(const StateLayout& layout, const std::vector<std::string>& dims) {
  std::int64_t size = 1;
  for (const std::string& dim : dims) size *= layout.mesh[FindMeshDim(layout, dim)].size;
  return size;
}

// The rank's coordinate along one dimension.
inline std::int64_t CoordinateAlong(const StateLayout& layout, std::int64_t dim, std::int64_t rank) {
  for (std::size_t d = layout.mesh.size() - 1; d > static_cast<std::size_t>(dim); --d)
    rank /= layout.mesh[d].size;
  return rank % layout.mesh[dim].size;
}

// ... along several, flattened.
inline std::int64_t CoordinateAlong(const StateLayout& layout, const std::vector<std::string>& dims,
                                    std::int64_t rank) {
  std::int64_t coordinate = 0;
  for (const std::string& name : dims) {
    const std::int64_t dim = FindMeshDim(layout, name);
    coordinate = coordinate * layout.mesh[dim].size + CoordinateAlong(layout, dim, rank);
  }
  return coordinate;
}

}  // namespace shardplan
