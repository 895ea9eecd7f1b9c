// SPDX-License-Identifier: Apache-2.0
// Derives how the steps of a plan come to gradients that are reduced over a part of the ranks. A
// partial_reduce_output is reduced over the shards and not yet over the replicas, an inner_reduce_output over
// the inner ranks of the shards alone.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// The instructions that a step issues behind a backward of the unit, without those that order its streams.
struct PartialReduction {
  BufferId partial = -1;
  std::vector<std::int32_t> parameters;  // whose gradients are in it
  std::vector<Instruction> first;        // unsharded gradients -> `partial`
  std::vector<Instruction> again;        // ... added to what is there; empty: no step does that
};

// One for each unit that has a procedure reduce_partial and whose steps make what it reduces, of `unit`'s
// gradients as the model makes them; empty otherwise.
std::vector<PartialReduction> PartialReductionsOf(const Plan& plan);

}  // namespace shardplan::internal
