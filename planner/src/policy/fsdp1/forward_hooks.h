// SPDX-License-Identifier: Apache-2.0
// The hooks of a forward (_runtime_utils.py).
#pragma once

#include "order/record_order.h"
#include "policy/fsdp1/fsdp_state.h"

namespace shardplan::fsdp1 {

void OnForwardBegin(FsdpState& state, const HookPoint& event);
// _pre_forward, at the root behind _root_pre_forward; of a recomputation, too.
void PreForward(const Context& context, FsdpState& state, const HookPoint& event);
// _post_forward; of a recomputation, too.
void PostForward(const Context& context, FsdpState& state, const HookPoint& event);
void OnForwardEnd(FsdpState& state);

}  // namespace shardplan::fsdp1
