// SPDX-License-Identifier: Apache-2.0
// How a unit's parameters are cut, in elements: the one arithmetic that planner, simulator, executor and
// adapter share. docs/reference/plan-format.md has the rules.
//
// Parameters a [3, 2] and b [2] on two ranks ("--" is padding):
//
//                   rank 0              rank 1
//   per_parameter   a[0:2]  b[0:1]      a[2:3] --  b[1:2]     cut along shard_dim as torch.chunk does
//   flat            a0 a1 a2 a3         a4 a5 b0 b1           concatenated, padded, cut in equal pieces
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Ranks that shard the unit: size of its shard communicator, 1 without one.
std::int64_t ShardCount(const Plan& plan, const Unit& unit);

// Rows [first, first + count) of `rows` that piece `index` of `pieces` holds, cut as torch.chunk cuts: every
// piece ceil(rows / pieces) rows, the last ones fewer or none.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
  bool operator==(const RowRange&) const = default;
};
RowRange ChunkRows(std::int64_t rows, std::int64_t pieces, std::int64_t index);

// The place of piece `piece` of the shards in the input of the first of two reductions, which is over `inner`
// of `shards` ranks. The pieces that a rank of the first level gets lie one behind the other, in the order of
// the ranks of the second. `inner` = `shards`: rank by rank.
std::int64_t InnerSlot(std::int64_t piece, std::int64_t inner, std::int64_t shards);

// Elements of a parameter.
std::int64_t Numel(const UnitParameter& parameter);
// Elements of one padded piece of a per_parameter parameter: ceil(shape[d] / pieces) x the other dimensions,
// where d is shard_dim. A scalar counts as one row.
std::int64_t PaddedPieceNumel(const UnitParameter& parameter, std::int64_t pieces);
// Shape of the piece that rank `index` of `pieces` holds, without padding.
std::vector<std::int64_t> ShardShape(const UnitParameter& parameter, std::int64_t pieces, std::int64_t index);

// Dtype that a parameter is gathered and computed in: its own, where it has one, or its unit's.
DType ComputeDType(const Unit& unit, const UnitParameter& parameter);

// Dtype of what is gathered of it: of the first tensor where an extension makes several.
DType GatheredDType(const Unit& unit, const UnitParameter& parameter);

// Whether the buffer holds what is gathered: of an all-gather input, not a copy of the shard on the device.
bool HoldsGathered(const Unit& unit, const Buffer& buffer);
// Dtype of a parameter in a buffer of its unit. A buffer of several dtypes is gathered as bytes and keeps
// them.
DType DTypeIn(const Unit& unit, const UnitParameter& parameter, const Buffer& buffer);

// Parameters that a buffer holds: Buffer::parameters, or all of its unit's when that is empty.
std::vector<std::int32_t> ParametersOf(const Plan& plan, const Buffer& buffer);

}  // namespace shardplan
