// SPDX-License-Identifier: Apache-2.0
// Device memory pool by pool: every stream's memory comes back to that stream alone, so what a plan needs is
// the sum of the pools' own peaks, at whatever times these are (docs/reference/optimize.md).
#pragma once

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

struct PooledMemory {
  Bytes pooled_bytes;     // sum of the peaks of the pools, over all steps
  Bytes allocated_bytes;  // peak of all pools together
  bool operator==(const PooledMemory&) const = default;
};

// Blocks are rounded up to 512 bytes, as the caching allocator does; frees count where the host issues them.
PooledMemory PoolMemory(const Plan& plan);

}  // namespace shardplan
