// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/backward_hooks.h"

#include "policy/fsdp1/flat_param_grad.h"
#include "policy/fsdp1/reduce_grad.h"
#include "policy/fsdp1/runtime_utils.h"

namespace shardplan::fsdp1 {
namespace {

void PostBackwardReshard(FsdpState& state, FlatParamHandle& handle, const UnshardStreams& streams) {
  Reshard(state, handle, ShouldFreeInBackward(state, handle), /*grad_enabled=*/false, streams);
  PrefetchHandle(state, handle, PrefetchMode::kBackward);
}

void PostBackwardHook(FsdpState& state, FlatParamHandle& handle, std::int32_t microbatch) {
  const Context& context = handle.context();
  context.builder.BeginTrigger(TriggerKind::kPostBackward, handle.id(), microbatch);
  context.builder.SetReason("accumulate_grad");
  const BufferId added = AccumulateGrad(handle);
  state.backward.accumulated = true;
  handle.training_state = HandleTrainingState::kBackwardPost;
  handle.flat_param.post_backward_called = true;
  context.builder.SetReason("post_backward");
  PostBackwardReshard(state, handle, context.post_backward_hook_streams());
  if (!state.sync_gradients) {
    // Without sharding `.grad` may be the reduced gradient.
    if (!handle.flat_param.grad.exists()) context.faults_seen.mixed_with_reduced = true;
  } else {
    context.builder.WaitStream(context.streams.post_backward, context.streams.unshard,
                               context.EventName(handle.id(), "grads_ready"));
    ReduceGrad(handle, /*engine_holds=*/added < 0);
  }
  FreeAddedGrad(handle, added);
}

// Reshards what a backward has unsharded for an output that the loss does not depend on.
void CatchAllReshard(FsdpState& state, FlatParamHandle& handle) {
  if (handle.PointsToShard() && !handle.skipped_use_sharded_views) return;
  Reshard(state, handle, ShouldFreeInBackward(state, handle), /*grad_enabled=*/false,
          handle.context().unshard_streams());
}

// Without sync `.grad` stays unsharded and a saved gradient stays saved.
void FinalizeParams(const FsdpState& state, FlatParamHandle& handle) {
  handle.flat_param.post_backward_hook_state.Remove();
  handle.flat_param.reshard_only_hook.reset();
  if (state.sync_gradients && handle.config().requires_grad) PrepareGradientForOptim(handle, kCompute);
}

void PostBackwardFinalCallback(const Context& context, FsdpState& state) {
  ProgramBuilder& builder = context.builder;
  builder.SetUnit(-1);
  builder.SetReason("final");
  if (state.sync_gradients) {
    builder.WaitStream(kCompute, context.streams.post_backward, "backward_end.post_backward");
    if (context.streams.all_reduce >= 0) {
      builder.WaitStream(kCompute, context.streams.all_reduce, "backward_end.all_reduce");
    }
    // The root's offload: gradients have to be in host memory.
    if (context.partition.units[0].cpu_offload) context.SynchronizeStream(kCompute, "backward_end.offload");
  }
  state.exec_order_data.NextIter();
  for (const UnitId unit : context.partition.states) {
    FlatParamHandle* handle = state.HandleOf(unit);
    if (handle == nullptr) continue;
    builder.SetUnit(unit);
    CatchAllReshard(state, *handle);
    FinalizeParams(state, *handle);
    handle->ran_pre_backward_hook = false;
    handle->needs_pre_backward_unshard = false;
    handle->post_forward_index.reset();
    handle->training_state = HandleTrainingState::kIdle;
    handle->ClearPrefetched();
  }
  state.post_backward_callback_queued = false;
}

}  // namespace

void OnBackwardBegin(const Context& context, FsdpState& state, const HookPoint& event) {
  state.backward = {};
  for (std::size_t f = 0; f < event.microbatches.size(); ++f) {
    state.backward.forwards.push_back({event.microbatches[f], event.runs[f]});
  }
  const Pass& backward = context.trace.backwards[event.range.pass];
  const UndoneCalls undone =
      CallsUndoneBy(context.trace, context.index, context.partition, backward, state.backward.forwards);
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (handle) handle->flat_param.post_backward_hook_state.OnBackwardBegin(undone, state.backward.forwards);
  }
}

void PreBackwardHook(const Context& context, FsdpState& state, const HookPoint& event) {
  FlatParamHandle* handle = state.HandleOf(event.unit);
  context.builder.BeginTrigger(TriggerKind::kPreBackward, event.unit, event.microbatch);
  if (handle != nullptr && handle->ran_pre_backward_hook) return;
  context.builder.SetReason("pre_backward");
  if (context.partition.units[event.unit].is_root) {
    if (!state.post_backward_callback_queued) ResetFlatParamGradInfoIfNeeded(context, state);
    state.post_backward_callback_queued = true;
  }
  if (handle == nullptr) return;
  state.backward.unit = event.unit;
  handle->training_state = HandleTrainingState::kBackwardPre;
  if (handle->needs_pre_backward_unshard) {
    if (!handle->prefetched) Unshard(state, *handle, context.unshard_streams(), "pre_backward");
    WaitForUnshard(*handle);
  } else {
    context.faults_seen.not_gathered_again = true;
  }
  handle->needs_pre_backward_unshard = false;
  PrefetchHandle(state, *handle, PrefetchMode::kBackward);
  PrepareGradientForBackward(*handle);
  handle->ran_pre_backward_hook = true;
}

void OnUnitBackwardDone(FsdpState& state, const HookPoint& event) {
  const UnitCall call{event.unit, event.occurrence, {event.microbatch, event.run}};
  const auto run = [&](FlatParamHandle& handle) {
    const FlatParameter& flat_param = handle.flat_param;
    if (!flat_param.post_backward_hook_state.RunsAt(call) || flat_param.view_grads.empty()) return;
    PostBackwardHook(state, handle, event.microbatch);
  };
  // A prefetched unit's views are the newer.
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (handle && handle->id() != event.unit) run(*handle);
  }
  if (FlatParamHandle* own = state.HandleOf(event.unit)) run(*own);
}

void PostBackwardReshardOnlyHook(const Context& context, FsdpState& state, const HookPoint& event) {
  FlatParamHandle* handle = state.HandleOf(event.unit);
  const UnitCall call{event.unit, event.occurrence, {event.microbatch, event.run}};
  if (handle == nullptr || handle->flat_param.reshard_only_hook != call) return;
  context.builder.BeginTrigger(TriggerKind::kPostBackward, event.unit, event.microbatch);
  context.builder.SetReason("reshard_only");
  handle->training_state = HandleTrainingState::kBackwardPost;
  PostBackwardReshard(state, *handle, context.unshard_streams());  // a hook on inputs
}

void OnBackwardEnd(const Context& context, FsdpState& state, const HookPoint& event) {
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (!handle || handle->flat_param.view_grads.empty()) continue;
    if (handle->flat_param.post_backward_hook_state.Runs())
      PostBackwardHook(state, *handle, event.microbatch);
  }
  context.builder.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  context.builder.SetReason("accumulate_grad");
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (!handle) continue;
    if (!handle->flat_param.view_grads.empty()) {
      context.builder.SetUnit(handle->id());
      FreeAddedGrad(*handle, AccumulateGrad(*handle));
      state.backward.accumulated = context.faults_seen.missed_hook = true;
    }
    handle->flat_param.post_backward_hook_state.OnBackwardEnd(state.backward.forwards);
  }
  if (state.backward.accumulated) {  // the engine, of the streams of nodes without successors
    context.builder.SetUnit(-1);
    context.builder.WaitStream(kCompute, context.streams.unshard, "backward_end.flat_gradients");
  }
  state.backward = {};
  if (state.post_backward_callback_queued) PostBackwardFinalCallback(context, state);
}

}  // namespace shardplan::fsdp1
