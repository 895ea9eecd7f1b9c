// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/runtime_utils.h"

#include "policy/fsdp1/flat_param_grad.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp1 {
namespace {

// _get_handle_to_prefetch
FlatParamHandle* HandleToPrefetch(FsdpState& state, const FlatParamHandle& current) {
  const UnitChoice& choice = current.context().partition.units[current.id()];
  const HandleTrainingState training = current.training_state;
  SHARDPLAN_ASSERT(
      training != HandleTrainingState::kIdle && training != HandleTrainingState::kSummonFullParams,
      "hooks set the state before they prefetch");
  const bool in_backward = (training == HandleTrainingState::kBackwardPre &&
                            choice.backward_prefetch == Fsdp1BackwardPrefetch::kPre) ||
                           (training == HandleTrainingState::kBackwardPost &&
                            choice.backward_prefetch == Fsdp1BackwardPrefetch::kPost);
  UnitId candidate = -1;
  if (in_backward) {
    candidate = state.exec_order_data.HandleToBackwardPrefetch(current);
  } else if (training == HandleTrainingState::kForward && choice.forward_prefetch) {
    candidate = state.exec_order_data.HandleToForwardPrefetch(current);
  }
  if (candidate < 0) return nullptr;
  FlatParamHandle* handle = state.HandleOf(candidate);
  SHARDPLAN_ASSERT(handle != nullptr, "ExecOrderData records handles");
  const bool needs_unshard =
      in_backward ? handle->needs_pre_backward_unshard : handle->needs_pre_forward_unshard;
  return needs_unshard && !handle->prefetched ? handle : nullptr;
}

}  // namespace

void LazyInit(const Context& context, FsdpState& state) {
  if (state.is_initialized) return;
  state.is_initialized = true;
  context.builder.BeginTrigger(TriggerKind::kLazyInit, -1, 0);
  context.builder.SetReason("lazy_init");
  for (const UnitId unit : context.partition.states) {
    context.builder.SetUnit(unit);
    if (FlatParamHandle* handle = state.HandleOf(unit)) handle->InitFlatParamAttributes();
  }
}

void Unshard(FsdpState& state, FlatParamHandle& handle, const UnshardStreams& streams,
             std::string_view reason) {
  const Context& context = handle.context();
  const InstructionLabel label(context.builder, handle.id(), reason);
  const BufferId shard = handle.PreUnshard(streams);
  const bool ran_pre_unshard = shard != handle.flat_param.local_shard;
  if (ran_pre_unshard) {
    context.builder.WaitStream(streams.unshard, streams.pre_unshard,
                               context.EventName(handle.id(), "pre_unshard"));
  }
  if (context.strategy.fsdp1.limit_all_gathers) {
    if (const std::optional<EventId> event = state.free_event_queue.DequeueIfNeeded()) {
      context.builder.HostWait(*event);
    }
  }
  handle.Unshard(shard, streams);
  handle.PostUnshard(streams);
}

void Reshard(FsdpState& state, FlatParamHandle& handle, bool free_unsharded_flat_param, bool grad_enabled,
             const UnshardStreams& streams) {
  const Context& context = handle.context();
  handle.Reshard(free_unsharded_flat_param, grad_enabled, streams);
  if (context.strategy.fsdp1.limit_all_gathers && free_unsharded_flat_param) {
    const EventId free_event =
        state.free_event_queue.NewEvent(context.builder, context.EventName(handle.id(), "free"));
    context.builder.Record(free_event, streams.current);
    state.free_event_queue.Enqueue(free_event);
  }
  handle.PostReshard(streams);
  handle.ClearPrefetched();
}

void WaitForUnshard(const FlatParamHandle& handle) {
  const Context& context = handle.context();
  context.builder.WaitStream(kCompute, context.streams.unshard, context.EventName(handle.id(), "unshard"));
}

void PrefetchHandle(FsdpState& state, const FlatParamHandle& current, PrefetchMode mode,
                    std::optional<UnitCall> views) {
  FlatParamHandle* handle = HandleToPrefetch(state, current);
  if (handle == nullptr) return;
  Unshard(state, *handle, handle->context().unshard_streams(),
          mode == PrefetchMode::kForward ? "prefetch_forward" : "prefetch_backward");
  handle->SetPrefetched(views);
}

// Without sync SHARD_GRAD_OP keeps its parameters.
bool ShouldFreeInBackward(const FsdpState& state, const FlatParamHandle& handle) {
  return handle.config().sharded && (state.sync_gradients || handle.config().reshards_after_forward);
}

void ResetFlatParamGradInfoIfNeeded(const Context& context, FsdpState& state) {
  if (!state.grads_zeroed) return;
  state.grads_zeroed = false;
  // Dropped in the backward already, and the memory for those to come on the host stays.
  if (context.strategy.optimizer.in_backward) return;
  const InstructionLabel label(context.builder, -1, "zero_grad");
  context.builder.Emit(InstructionKind::kZeroGrad, -1);
  for (std::optional<FlatParamHandle>& handle : state.handles) {
    if (handle) ResetGrad(*handle);
  }
}

}  // namespace shardplan::fsdp1
