// SPDX-License-Identifier: Apache-2.0
// FullyShardedDataParallel.summon_full_params (_unshard_param_utils.py).
#pragma once

#include "order/record_order.h"
#include "policy/fsdp1/fsdp_state.h"
#include "shardplan/schemas/error.h"

namespace shardplan::fsdp1 {

// Enters the context manager (the call's value is true) or leaves it. Unit by unit the host waits for the
// device; the parameters are gathered in the original dtype, on the compute stream, and freed by those that
// they were gathered by. With rank0_only the other ranks free them at once; the plan is rank 0's. (What the
// user changed is written back to this rank's shard: a copy on the device that is no instruction.)
// kBadInput: arguments that FSDP1 refuses.
Status SummonFullParams(const Context& context, FsdpState& state, const HookPoint& event);

}  // namespace shardplan::fsdp1
