// SPDX-License-Identifier: Apache-2.0
// What gradients take that wait for their reduction: micro-batches without synchronisation (no_sync,
// set_requires_gradient_sync(False)), or reduced over a part of the ranks so far
// (set_requires_all_reduce(False), inner_reduce_ranks).
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan {

struct DeferredGradients {
  Bytes peak_bytes;        // each allocation rounded up to 512; 0: none waits
  std::int32_t units = 0;  // whose gradients wait at that point
  MemoryPoint at;          // the first point with that much
  bool operator==(const DeferredGradients&) const = default;
};

// Over plan.steps[step]. A gradient waits if it is alive, not reduced over all its ranks, where a backward
// ends:
//
//   micro-batch       0                 1                 2
//   backward      |--------|        |--------|        |--------|
//   gradient          +=====================================-      waits from + on
//   another                +-                                       does not
//
// It counts from its allocation to its free.
DeferredGradients DeferredGradientsOf(const Plan& plan, std::int32_t step);
DeferredGradients DeferredGradientsOf(const Plan& plan, const MemoryHistory& history, std::int32_t step);

}  // namespace shardplan
