// SPDX-License-Identifier: Apache-2.0
// The copy of unsharded gradients into a reduce-scatter's input (the loop over chunked gradients of
// foreach_reduce, and foreach_reduce_scatter_copy_in, in _fsdp_collectives.py).
#pragma once

#include <string_view>
#include <vector>

#include "policy/fsdp2/unit_scope.h"
#include "policy/fsdp2/unsharded_grads.h"

namespace shardplan::fsdp2 {

struct ReduceScatterInput {
  BufferId buffer = -1;
  // Buffers of gradients that foreach_reduce names until it returns. The others are freed already.
  std::vector<BufferId> named_grads;
};

// Copies the gradients, cut and padded, one rank's piece after another, into a new buffer.
// `from_process_group`: where its memory comes from; `suffix`: of its name.
ReduceScatterInput ReduceScatterCopyIn(const UnitScope& scope, const UnshardedGrads::Taken& taken,
                                       bool from_process_group, DType dtype, std::string_view suffix);

}  // namespace shardplan::fsdp2
