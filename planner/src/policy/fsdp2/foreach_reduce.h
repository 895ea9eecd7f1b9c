// SPDX-License-Identifier: Apache-2.0
// The reduction of a parameter group's gradients (foreach_reduce in _fsdp_collectives.py).
//
// [Note: how long a reduced buffer lives]
// The reduce-scatter's output becomes the gradient when no cast is needed; else nothing names it when
// foreach_reduce returns. With HSDP it is the input of an all-reduce on another stream and is kept until the
// unit's next post_backward or the end of the backward.
#pragma once

#include <optional>

#include "policy/fault_list.h"
#include "policy/fsdp2/fsdp_comm_context.h"
#include "policy/fsdp2/param_group_settings.h"
#include "policy/fsdp2/sharded_grads.h"
#include "policy/fsdp2/unit_scope.h"
#include "policy/fsdp2/unsharded_grads.h"
#include "policy/optimizer_memory.h"

namespace shardplan::fsdp2 {

// The input of an all-reduce, kept for it.
struct AllReduceState {
  BufferId input = -1;
  EventId event = -1;
  bool operator==(const AllReduceState&) const = default;
};

// The arguments of a call of foreach_reduce.
struct ForeachReduceArguments {
  const UnitScope& scope;
  const ParamGroupSettings& settings;
  FsdpCommContext& comm_ctx;
  ShardedGrads& sharded_grads;
  FaultList& faults;
  OptimizerMemory* optimizer_in_backward = nullptr;  // null: none steps in the backward
  BufferId partial_reduce_output = -1;  // reduced over the shards in an earlier backward; -1: none
};

struct ForeachReduceResult {
  FsdpCommContext::ReduceScatterState reduce_scatter;
  EventId post_reduce_event = -1;
  StreamId post_reduce_stream = kCompute;  // that it is recorded on
  std::optional<AllReduceState> all_reduce;
  BufferId partial_reduce_output = -1;  // waits for an all-reduce; -1: none
};

// kBadInput where PyTorch fails.
Result<ForeachReduceResult> ForeachReduce(const ForeachReduceArguments& arguments,
                                          const UnshardedGrads::Taken& grads);

// The rest of one that left `partial_reduce_output`: the all-reduce over the replicas, and what follows it.
ForeachReduceResult ReducePartialOutput(const ForeachReduceArguments& arguments);

}  // namespace shardplan::fsdp2
