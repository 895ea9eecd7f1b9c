// SPDX-License-Identifier: Apache-2.0
// Sizes of shards and gathered buffers in both layouts.
#pragma once

#include <vector>

#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// flat: sets every flat_offset and flat_numel (FlatParamHandle). With aligned parameters (use_orig_params)
// each starts at a multiple of 16 bytes of `aligned_dtype` and the total is padded to a multiple of `ranks`;
// without, only torch.chunk's tail padding makes the shards equal.
void LayOutFlat(Unit& unit, bool aligned, DType aligned_dtype, std::int64_t ranks);

// ---- per_parameter units: what an all-gather moves (FSDPParam.all_gather_inputs) ----
// The tensors of a parameter that one of `ranks` gathers: its padded piece, or what its extension makes of
// that.
std::vector<ExtensionBuffer> GatheredTensors(const Unit& unit, const UnitParameter& parameter,
                                             std::int64_t ranks);
// The all-gather buffer's dtype: uint8 when the gathered tensors of the unit differ in theirs.
DType GatherDType(const Unit& unit);
// Bytes by parameter of what one of `ranks` gathers.
std::vector<Bytes> GatherInputParts(const Unit& unit, std::int64_t ranks);
// Bytes by parameter of the rank's persistent piece, in the original dtypes.
std::vector<Bytes> OriginalShardParts(const Unit& unit, std::int64_t ranks);
// Bytes by parameter of the first gathered tensor (without extension the only one), of all ranks.
std::vector<Bytes> UnshardedParts(const Unit& unit, std::int64_t ranks);

Bytes Sum(const std::vector<Bytes>& parts);

}  // namespace shardplan
