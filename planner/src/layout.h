// Sizes of shards and gathered buffers in both layouts.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

std::int64_t Numel(const UnitParameter& parameter);

// per_parameter: elements of one rank's padded piece: ceil(shape[shard_dim] / ranks) rows (FSDPParam pads
// every rank to the first chunk of torch.chunk).
std::int64_t PaddedShardNumel(const UnitParameter& parameter, std::int64_t ranks);

// flat: sets every flat_offset and flat_numel (FlatParamHandle). With aligned parameters (use_orig_params)
// each starts at a multiple of 16 bytes of `aligned_dtype` and the total is padded to a multiple of `ranks`;
// without, only torch.chunk's tail padding makes the shards equal.
void LayOutFlat(Unit& unit, bool aligned, DType aligned_dtype, std::int64_t ranks);

// Bytes of each piece, parameter by parameter (per_parameter) or as one (flat): of the unsharded parameters
// as gathered over `ranks`, padding included / of one rank's piece.
std::vector<Bytes> GatheredParts(const Unit& unit, std::int64_t ranks, DType dtype);
std::vector<Bytes> ShardParts(const Unit& unit, std::int64_t ranks, DType dtype);
Bytes Sum(const std::vector<Bytes>& parts);

}  // namespace shardplan
