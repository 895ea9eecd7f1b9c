// SPDX-License-Identifier: Apache-2.0
// Temporaries of FSDP2's two copies of many tensors in the caching allocator: a table of addresses and sizes
// that their one kernel reads, given back as soon as it is launched
// (aten/src/ATen/native/cuda/TensorShape.cu).
#pragma once

#include <cstdint>
#include <span>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// split_with_sizes_copy: `splits` are the bytes of each tensor in one of `chunks` equal parts of what is
// split.
Bytes SplitTableBytes(std::span<const std::int64_t> splits, std::int64_t chunks, const Device& device);
// _chunk_cat: `pieces` are the bytes of each tensor, padded, in one of the parts that are made.
Bytes ChunkCatTableBytes(std::span<const std::int64_t> pieces);

// The table of the instruction, a copy_out or the first grad_copy_in of a reduction; 0 where its kernel has
// none: flat units, and dtypes that differ (but for bfloat16 to float32). `chunks`: ranks that gathered what
// a copy_out splits.
Bytes CopyTableBytes(const Plan& plan, const Instruction& instruction, std::int64_t chunks);

}  // namespace shardplan::internal
