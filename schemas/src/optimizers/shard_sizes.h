// SPDX-License-Identifier: Apache-2.0
// Sizes of what an optimizer makes of one shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>

#include "shardplan/schemas/optimizers.h"

namespace shardplan::internal {

inline constexpr Bytes kScalar{4};  // of float32: a step count and what is computed from it

inline std::int64_t Numel(const OptimizerShard& shard) {
  return std::accumulate(shard.shape.begin(), shard.shape.end(), std::int64_t{1}, std::multiplies<>());
}

inline bool IsMatrix(const OptimizerShard& shard) { return shard.shape.size() > 1; }

// Bytes of a shard's tensor with the dimension `from_last` (1: the last) reduced to one element.
inline Bytes Reduced(const OptimizerShard& shard, std::size_t from_last) {
  const std::int64_t size = shard.shape[shard.shape.size() - from_last];
  return {size == 0 ? 0 : SizeBytes(shard).value / size};
}

// SGD and Adafactor make all that they keep and compute of the gradient.
inline OptimizerShard InGradDType(OptimizerShard shard) {
  shard.dtype = shard.grad_dtype.value_or(shard.dtype);
  return shard;
}

}  // namespace shardplan::internal
