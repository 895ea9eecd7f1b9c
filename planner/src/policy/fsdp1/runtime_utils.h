// SPDX-License-Identifier: Apache-2.0
// Functions that the hooks share (_runtime_utils.py). The hooks are in forward_hooks.h and backward_hooks.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "policy/fsdp1/fsdp_state.h"

namespace shardplan::fsdp1 {

enum class PrefetchMode : std::uint8_t { kBackward, kForward };

// Runs once: before the root's first forward, or before the first summon_full_params of the root. A trigger
// of its own.
void LazyInit(const Context& context, FsdpState& state);

void Unshard(FsdpState& state, FlatParamHandle& handle, const UnshardStreams& streams,
             std::string_view reason);
// `streams`: that it was unsharded on.
void Reshard(FsdpState& state, FlatParamHandle& handle, bool free_unsharded_flat_param, bool grad_enabled,
             const UnshardStreams& streams);
// The compute stream waits for the all-gather.
void WaitForUnshard(const FlatParamHandle& handle);

// Unshards the unit that is next, without a wait. `views`: the pre-forward in which that makes views, if it
// makes any that gradients come through.
void PrefetchHandle(FsdpState& state, const FlatParamHandle& current, PrefetchMode mode,
                    std::optional<UnitCall> views = std::nullopt);

bool ShouldFreeInBackward(const FsdpState& state, const FlatParamHandle& handle);

// The user drops the gradients of the original parameters; FSDP1 then drops that of the flat parameter, when
// it looks at it next.
void ResetFlatParamGradInfoIfNeeded(const Context& context, FsdpState& state);

}  // namespace shardplan::fsdp1
