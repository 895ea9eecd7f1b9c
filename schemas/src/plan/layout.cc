// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/layout.h"

#include <algorithm>

namespace shardplan {
namespace {

// Elements after dimension `first` (all of a scalar's one).
std::int64_t Product(const std::vector<std::int64_t>& shape, std::size_t first) {
  std::int64_t product = 1;
  for (std::size_t i = first; i < shape.size(); ++i) product *= shape[i];
  return product;
}

}  // namespace

std::int64_t ShardCount(const Plan& plan, const Unit& unit) {
  return unit.shard_communicator < 0 ? 1 : plan.communicators[unit.shard_communicator].size;
}

std::int64_t InnerSlot(std::int64_t piece, std::int64_t inner, std::int64_t shards) {
  return piece % inner * (shards / inner) + piece / inner;
}

RowRange ChunkRows(std::int64_t rows, std::int64_t pieces, std::int64_t index) {
  const std::int64_t rows_of_piece = (rows + pieces - 1) / pieces;
  const std::int64_t first = std::min(rows, index * rows_of_piece);
  return {first, std::min(rows, first + rows_of_piece) - first};
}

std::int64_t Numel(const UnitParameter& parameter) { return Product(parameter.shape, 0); }

std::int64_t PaddedPieceNumel(const UnitParameter& parameter, std::int64_t pieces) {
  if (parameter.shape.empty()) return 1;
  const std::int64_t rows = parameter.shape[parameter.shard_dim];
  if (rows == 0) return 0;
  return Numel(parameter) / rows * ((rows + pieces - 1) / pieces);
}

std::vector<std::int64_t> ShardShape(const UnitParameter& parameter, std::int64_t pieces,
                                     std::int64_t index) {
  std::vector<std::int64_t> shape = parameter.shape;
  if (!shape.empty()) {
    shape[parameter.shard_dim] = ChunkRows(shape[parameter.shard_dim], pieces, index).count;
  }
  return shape;
}

DType ComputeDType(const Unit& unit, const UnitParameter& parameter) {
  return parameter.param_dtype.value_or(unit.param_dtype);
}

DType GatheredDType(const Unit& unit, const UnitParameter& parameter) {
  return parameter.gathered.empty() ? ComputeDType(unit, parameter) : parameter.gathered.front().dtype;
}

bool HoldsGathered(const Unit& unit, const Buffer& buffer) {
  const RoleDType dtype = DescriptionOf(buffer.role).dtype;
  return dtype == RoleDType::kGathered ||
         (dtype == RoleDType::kGatheredOrOriginal && buffer.dtype == unit.param_dtype);
}

DType DTypeIn(const Unit& unit, const UnitParameter& parameter, const Buffer& buffer) {
  if (DescriptionOf(buffer.role).dtype == RoleDType::kOriginal) return parameter.dtype;
  return HoldsGathered(unit, buffer) ? GatheredDType(unit, parameter) : buffer.dtype;
}

std::vector<std::int32_t> ParametersOf(const Plan& plan, const Buffer& buffer) {
  if (!buffer.parameters.empty() || buffer.unit < 0) return buffer.parameters;
  std::vector<std::int32_t> all(plan.units[buffer.unit].parameters.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
  return all;
}

}  // namespace shardplan
