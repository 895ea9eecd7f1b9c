// SPDX-License-Identifier: Apache-2.0
// The hooks of a backward, and what follows it (_runtime_utils.py).
#pragma once

#include "order/record_order.h"
#include "policy/fsdp1/fsdp_state.h"

namespace shardplan::fsdp1 {

// Finds where in this backward each unit's post-backward hook runs.
void OnBackwardBegin(const Context& context, FsdpState& state, const HookPoint& event);
void PreBackwardHook(const Context& context, FsdpState& state, const HookPoint& event);
// The post-backward hooks of all units whose views were made in the pre-forward that is undone.
void OnUnitBackwardDone(FsdpState& state, const HookPoint& event);
// The reshard of a frozen unit.
void PostBackwardReshardOnlyHook(const Context& context, FsdpState& state, const HookPoint& event);
// The rest in the end: gradients of views that were made in a forward which this backward does not
// cover, and gradients without a hook. Then the final callback.
void OnBackwardEnd(const Context& context, FsdpState& state, const HookPoint& event);

}  // namespace shardplan::fsdp1
