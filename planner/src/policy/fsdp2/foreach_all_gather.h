// SPDX-License-Identifier: Apache-2.0
// The all-gather of a parameter group (foreach_all_gather, foreach_all_gather_copy_out in
// _fsdp_collectives.py).
#pragma once

#include "policy/fsdp2/fsdp_comm_context.h"
#include "policy/fsdp2/fsdp_param.h"
#include "policy/fsdp2/unit_scope.h"

namespace shardplan::fsdp2 {

// Buffers and events that live between an unshard and its wait. On one rank nothing is gathered: all is -1.
struct AllGatherResult {
  BufferId output = -1;
  EventId event = -1;
  bool async_op = false;  // all_gather_work is not None
  bool second = false;    // the unit's second output: its first is still kept
  bool operator==(const AllGatherResult&) const = default;
};

struct AllGatherArguments {
  FsdpCommContext::AllGatherStreams streams;
  bool async_op = false;
  bool from_process_group = false;  // where the output's memory comes from
  bool second = false;
};

// Over the smaller mesh where the parameters are sharded so.
AllGatherResult ForeachAllGather(const UnitScope& scope, const FsdpParams& params,
                                 const AllGatherArguments& arguments);
void ForeachAllGatherCopyOut(const UnitScope& scope, const FsdpParams& params, const AllGatherResult& result);

}  // namespace shardplan::fsdp2
