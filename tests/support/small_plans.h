// SPDX-License-Identifier: Apache-2.0
// Small plans that follow FSDP2's or FSDP1's schedule to the letter: same streams, same waits, same
// lifetimes. Good plans for tests to start from, and to break.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

struct SmallPlanOptions {
  int units = 2;       // a chain of units; there is no root with parameters of its own
  int parameters = 1;  // of each unit
  int shards = 2;
  int replicas = 1;              // > 1: HSDP
  bool mixed_precision = false;  // bf16 gather, fp32 reduce
  bool bf16_reduce = false;      // reduce in bf16, keep gradients in fp32
  bool reshard_after_forward = true;
  bool reshard_to_shards = false;  // ... parameter by parameter, to shards of a smaller mesh
  bool prefetch = true;            // in the backward, of the unit before
  bool sum_reduction = false;      // sum, then divide: force_sum_reduction_for_comms
  bool reduce_into_grad =
      false;             // where dtypes agree: reduce_scatter writes grad_sharded, no separate output
  int microbatches = 1;  // all but the last accumulate without reducing
  bool owners = false;   // Muon steps the first parameter of each unit, by owners
  bool on_all = false;   // ... or whole on every rank; without replicas
};

// Two steps, "first" (makes the optimizer states) and "steady".
Plan Fsdp2LikePlan(const SmallPlanOptions& options);

struct SmallFsdp1Options {
  int units = 2;
  int shards = 2;
  int replicas = 1;  // > 1: hybrid sharding
  bool mixed_precision = false;
  bool free_after_forward = true;  // FULL_SHARD; false: SHARD_GRAD_OP
  bool prefetch = true;            // BACKWARD_PRE
  bool limit_all_gathers = true;   // the host waits until the second last freed parameter is out of use
  bool offload = false;            // shards and gradients in host memory, the optimizer on the host
};

// One step; the optimizer has no states.
Plan Fsdp1LikePlan(const SmallFsdp1Options& options);

}  // namespace shardplan::test
