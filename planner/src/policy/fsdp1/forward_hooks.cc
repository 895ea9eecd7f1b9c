// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/forward_hooks.h"

#include "policy/fsdp1/runtime_utils.h"

namespace shardplan::fsdp1 {
namespace {

void RootPreForward(const Context& context, FsdpState& state) {
  if (context.partition.units[0].forward_prefetch) {
    for (std::optional<FlatParamHandle>& handle : state.handles) {
      if (!handle) continue;
      handle->needs_pre_forward_unshard = true;
      handle->ClearPrefetched();
    }
  }
  // _wait_for_computation_stream
  context.builder.WaitStream(context.streams.unshard, kCompute, "forward_begin");
  context.builder.Wait(context.builder.Event("forward_begin"), context.streams.pre_unshard);
  ResetFlatParamGradInfoIfNeeded(context, state);
}

// Returns the pre-forward in which the views that the unit uses were made. `call`: of no forward in a
// recomputation, whose views bring no gradients.
std::optional<UnitCall> PreForwardUnshard(FsdpState& state, FlatParamHandle& handle,
                                          const std::optional<UnitCall>& call) {
  std::optional<UnitCall> views = call;
  if (!handle.prefetched) {
    Unshard(state, handle, handle.context().unshard_streams(), "pre_forward");
  } else if (handle.prefetched_views) {
    views = handle.prefetched_views;
  }
  handle.needs_pre_forward_unshard = false;
  WaitForUnshard(handle);
  PrefetchHandle(state, handle, PrefetchMode::kForward, call);
  return views;
}

}  // namespace

void OnForwardBegin(FsdpState& state, const HookPoint& event) {
  state.calls.clear();
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (!handle) continue;
    handle->flat_param.post_backward_hook_state.OnForwardBegin({event.microbatch, event.run});
    handle->evaluates_in_full_precision =
        handle->context().strategy.fsdp1.full_precision_in_eval && !event.training;
  }
}

void OnForwardEnd(FsdpState& state) { state.calls.clear(); }

void PreForward(const Context& context, FsdpState& state, const HookPoint& event) {
  const bool recomputes = event.kind == HookPointKind::kRecomputePreForward;
  const bool enters_root = context.partition.units[event.unit].is_root && !recomputes;
  if (enters_root) LazyInit(context, state);
  context.builder.BeginTrigger(TriggerKind::kPreForward, event.unit, event.microbatch);
  context.builder.SetReason("pre_forward");
  if (enters_root) RootPreForward(context, state);
  std::optional<UnitCall> call;
  if (!recomputes) call = UnitCall{event.unit, state.calls[event.unit]++, {event.microbatch, event.run}};
  FlatParamHandle* handle = state.HandleOf(event.unit);
  if (handle == nullptr || handle->training_state == HandleTrainingState::kBackwardPre) return;
  state.exec_order_data.RecordPreForward(context, *handle, event.training);
  handle->training_state = HandleTrainingState::kForward;
  const std::optional<UnitCall> views = PreForwardUnshard(state, *handle, call);
  FlatParameter& flat_param = handle->flat_param;
  if (handle->config().requires_grad && recomputes) {
    flat_param.post_backward_hook_state.RegisterInRecomputation();
  } else if (handle->config().requires_grad && event.grad_enabled) {
    flat_param.post_backward_hook_state.Register(*call, *views);
  }
  if (handle->config().offloads && context.strategy.optimizer.in_backward) {
    flat_param.cpu_grad.Allocate(context.builder, kHost);
  }
  if (event.grad_enabled && !handle->config().requires_grad && !flat_param.reshard_only_hook) {
    flat_param.reshard_only_hook = call.value_or(UnitCall{});
  }
}

void PostForward(const Context& context, FsdpState& state, const HookPoint& event) {
  const bool is_root = context.partition.units[event.unit].is_root;
  context.builder.BeginTrigger(TriggerKind::kPostForward, event.unit, event.microbatch);
  context.builder.SetReason("post_forward");
  FlatParamHandle* handle = state.HandleOf(event.unit);
  if (handle != nullptr && handle->training_state == HandleTrainingState::kBackwardPre) return;
  if (handle != nullptr) {
    state.exec_order_data.RecordPostForward(*handle);
    const bool free = !is_root && handle->config().reshards_after_forward;
    Reshard(state, *handle, free, event.grad_enabled, context.unshard_streams());
  }
  // _register_pre_backward_hooks
  if (event.grad_enabled) {
    if (is_root) state.post_backward_callback_queued = false;
    if (handle != nullptr) {
      handle->ran_pre_backward_hook = false;
      handle->needs_pre_backward_unshard = event.outputs_require_grad;
    }
  }
  if (handle != nullptr) handle->training_state = HandleTrainingState::kIdle;
}

}  // namespace shardplan::fsdp1
