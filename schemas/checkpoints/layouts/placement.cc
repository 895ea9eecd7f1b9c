// SPDX-License-Identifier: Apache-2.0
// Which elements of a tensor a rank holds.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoints/layouts/mesh_digits.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {

std::int64_t RanksOf(const StateLayout& layout) {
  std::int64_t ranks = 1;
  for (const StrategyMeshDim& dim : layout.mesh) ranks *= dim.size;
  return ranks;
}

LocalPart PartOf(const StateLayout& layout, const StateTensor& tensor, std::int64_t rank) {
  LocalPart part;
  part.size = tensor.shape.empty() ? std::vector<std::int64_t>{1} : tensor.shape;
  part.low.assign(part.size.size(), 0);
  for (const TensorSplit& split : tensor.splits) {
    const RowRange rows = ChunkRows(part.size[split.tensor_dim], SizeAlong(layout, split.mesh_dims),
                                    CoordinateAlong(layout, split.mesh_dims, rank));
    part.low[split.tensor_dim] += rows.first;
    part.size[split.tensor_dim] = rows.count;
  }
  for (const MeshPosition& position : tensor.only) {
    const std::int64_t dim = FindMeshDim(layout, position.mesh_dim);
    if (CoordinateAlong(layout, dim, rank) != position.index) return part;
  }
  std::int64_t numel = 1;
  for (const std::int64_t extent : part.size) numel *= extent;
  part.count = numel;
  if (tensor.flat < 0) return part;
  const FlatBuffer& flat = layout.flats[tensor.flat];
  const std::int64_t piece = flat.numel / SizeAlong(layout, flat.mesh_dims);
  const std::int64_t begin = piece * CoordinateAlong(layout, flat.mesh_dims, rank);
  const std::int64_t from = std::max(begin, tensor.flat_offset);
  const std::int64_t to = std::min(begin + piece, tensor.flat_offset + numel);
  part.count = std::max<std::int64_t>(0, to - from);
  if (part.count == 0) return part;
  part.first = from - tensor.flat_offset;
  part.offset = from - begin;
  return part;
}

Bytes StorageBytes(const StateLayout& layout, std::int64_t rank) {
  Bytes bytes;
  for (const FlatBuffer& flat : layout.flats)
    bytes += Bytes{flat.numel / SizeAlong(layout, flat.mesh_dims) * SizeBytes(flat.dtype)};
  for (const StateTensor& tensor : layout.tensors) {
    if (tensor.flat < 0) bytes += Bytes{PartOf(layout, tensor, rank).count * SizeBytes(tensor.dtype)};
  }
  return bytes;
}

std::string PlacementKey(const StateLayout& layout, const StateTensor& tensor) {
  std::string key = fmt::format("{}|{}", SizeBytes(tensor.dtype), fmt::join(tensor.shape, "x"));
  for (const TensorSplit& split : tensor.splits) {
    key += fmt::format("|/{}", split.tensor_dim);
    for (const std::string& dim : split.mesh_dims) key += fmt::format(",{}", FindMeshDim(layout, dim));
  }
  for (const MeshPosition& position : tensor.only)
    key += fmt::format("|@{}={}", FindMeshDim(layout, position.mesh_dim), position.index);
  if (tensor.flat >= 0) {
    const FlatBuffer& flat = layout.flats[tensor.flat];
    key += fmt::format("|flat {} at {}", flat.numel, tensor.flat_offset);
    for (const std::string& dim : flat.mesh_dims) key += fmt::format(",{}", FindMeshDim(layout, dim));
  }
  return key;
}

}  // namespace shardplan
