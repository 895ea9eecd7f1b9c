// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/flat_param_handle.h"

#include <string_view>
#include <utility>

#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp1 {

FlatParamHandle::FlatParamHandle(const Context& context, UnitId id) : context_(&context), id_(id) {
  SHARDPLAN_ASSERT(context.flat_params[id].has_value(), "handles are made of units with parameters");
  const FlatParamConfig& c = config();
  const auto buffer = [&](BufferRole role, DType dtype, std::int64_t numel, std::string_view suffix = {},
                          MemoryKind memory = MemoryKind::kDevice) {
    return context.FlatBuffer(id, role, dtype, numel, suffix, memory);
  };
  flat_param.local_shard = buffer(BufferRole::kParamSharded, unit().orig_dtype, shard_numel(), {},
                                  c.offloads ? MemoryKind::kPinnedHost : MemoryKind::kDevice);
  if (c.sharded) {
    flat_param.full_param_padded.buffer =
        buffer(BufferRole::kParamUnsharded, unit().param_dtype, unit().flat_numel);
  }
  if (c.sharded && c.casts_params) {
    flat_param.full_prec_full_param_padded.buffer =
        buffer(BufferRole::kParamUnsharded, unit().orig_dtype, unit().flat_numel, "full_precision");
  }
  if (c.casts_params) {
    // Without sharding the copy of the shard is what the modules use.
    const BufferRole role = c.sharded ? BufferRole::kAllGatherInput : BufferRole::kParamUnsharded;
    flat_param.mp_shard.buffer = buffer(role, unit().param_dtype, shard_numel());
  }
  if (c.offloads) MakeCpuGrad();
  // Pinning makes a copy, the local shard; the flat parameter points to it from its first reshard on.
  flat_param.data = c.offloads ? -1 : flat_param.local_shard;
  flat_param.post_backward_hook_state = PostBackwardHookState(c.casts_params);
}

// There for ever, or, stepped and dropped in the backward, from one forward to its backward.
void FlatParamHandle::MakeCpuGrad() {
  ProgramBuilder& builder = context_->builder;
  Buffer host = builder.plan().buffers[flat_param.local_shard];
  host.name = context_->EventName(id_, Name(BufferRole::kGradHost));
  host.role = BufferRole::kGradHost;
  host.persistent = !context_->strategy.optimizer.in_backward;
  flat_param.cpu_grad.buffer = builder.AddBuffer(std::move(host));
}

void FlatParamHandle::InitFlatParamAttributes() {
  for (FlatStorage* storage :
       {&flat_param.mp_shard, &flat_param.full_param_padded, &flat_param.full_prec_full_param_padded}) {
    if (storage->buffer < 0) continue;
    storage->Allocate(context_->builder, kCompute);
    storage->Free(context_->builder, kCompute);
  }
}

bool FlatParamHandle::ForcesFullPrecision() const {
  return training_state == HandleTrainingState::kSummonFullParams || evaluates_in_full_precision;
}

FlatStorage& FlatParamHandle::PaddedUnshardedFlatParam() {
  return UsesFullPrecisionParam() ? flat_param.full_prec_full_param_padded : flat_param.full_param_padded;
}

bool FlatParamHandle::NeedsUnshard(const UnshardStreams& streams) {
  if (!config().sharded) return false;
  if (UsesFullPrecisionParam()) flat_param.full_param_padded.Free(context_->builder, streams.unshard);
  return !PaddedUnshardedFlatParam().allocated;
}

BufferId FlatParamHandle::PreUnshard(const UnshardStreams& streams) {
  ProgramBuilder& builder = context_->builder;
  const bool needs_unshard = NeedsUnshard(streams);
  if (config().sharded && !config().offloads && !needs_unshard) return flat_param.local_shard;
  const bool casts = config().casts_params && !ForcesFullPrecision();
  const bool copies = config().offloads && (casts || !IsOnDevice());
  if (casts) flat_param.mp_shard.Allocate(builder, streams.pre_unshard);
  if (copies) {
    const BufferRole role =
        config().sharded || casts ? BufferRole::kAllGatherInput : BufferRole::kParamUnsharded;
    if (!flat_param.device_shard.exists()) {  // it does in a forward inside of summon_full_params
      flat_param.device_shard.Allocate(
          builder, context_->FlatBuffer(id_, role, unit().orig_dtype, shard_numel(), "device"),
          streams.pre_unshard);
    }
    builder.Move(InstructionKind::kCopyToDevice, flat_param.local_shard, flat_param.device_shard.buffer,
                 streams.pre_unshard);
  }
  if (casts) {
    builder.Move(InstructionKind::kCopyIn, copies ? flat_param.device_shard.buffer : flat_param.local_shard,
                 flat_param.mp_shard.buffer, streams.pre_unshard);
    flat_param.device_shard.Free(builder, streams.pre_unshard);
    return flat_param.mp_shard.buffer;
  }
  return copies ? flat_param.device_shard.buffer : flat_param.local_shard;
}

void FlatParamHandle::Unshard(BufferId shard, const UnshardStreams& streams) {
  ProgramBuilder& builder = context_->builder;
  if (!config().sharded) {
    UseUnshardedFlatParam(shard);
    return;
  }
  FlatStorage& unsharded = PaddedUnshardedFlatParam();
  std::vector<StreamId> shard_used_on;
  if (NeedsUnshard(streams)) {
    unsharded.Allocate(builder, streams.unshard);
    builder.Move(InstructionKind::kAllGather, shard, unsharded.buffer, streams.unshard).communicator =
        unit().shard_communicator;
    shard_used_on.push_back(streams.unshard);
  }
  UseUnshardedFlatParam(unsharded.buffer);
  flat_param.device_shard.Free(builder, streams.pre_unshard, std::move(shard_used_on));
}

void FlatParamHandle::UseUnshardedFlatParam(BufferId unsharded) {
  context_->builder.Emit(InstructionKind::kBindUnsharded, -1).src = unsharded;
  if (unsharded != flat_param.local_shard) flat_param.data = unsharded;
}

void FlatParamHandle::PostUnshard(const UnshardStreams& streams) {
  if (!config().sharded) return;
  flat_param.mp_shard.Free(context_->builder, streams.pre_unshard, {streams.unshard});
}

void FlatParamHandle::Reshard(bool free_unsharded_flat_param, bool grad_enabled,
                              const UnshardStreams& streams) {
  UseShardedFlatParam(grad_enabled);
  if (free_unsharded_flat_param) FreeUnshardedFlatParam(streams);
}

void FlatParamHandle::UseShardedFlatParam(bool grad_enabled) {
  context_->builder.Emit(InstructionKind::kBindSharded, -1).src = flat_param.local_shard;
  skipped_use_sharded_views = context_->strategy.fsdp1.use_orig_params && grad_enabled && config().sharded &&
                              training_state == HandleTrainingState::kForward &&
                              !config().reshards_after_forward;
  flat_param.data = flat_param.local_shard;
}

// The mode now decides what is freed, whatever was gathered.
void FlatParamHandle::FreeUnshardedFlatParam(const UnshardStreams& streams) {
  const std::vector<StreamId> used_on = Context::RecordStream(streams.current, streams.unshard);
  flat_param.full_param_padded.Free(context_->builder, streams.unshard, used_on);
  if (!UsesFullPrecisionParam()) return;
  flat_param.full_prec_full_param_padded.Free(context_->builder, streams.unshard, used_on);
}

void FlatParamHandle::PostReshard(const UnshardStreams& streams) {
  if (config().sharded) return;
  const std::vector<StreamId> used_on = Context::RecordStream(streams.current, streams.pre_unshard);
  flat_param.mp_shard.Free(context_->builder, streams.pre_unshard, used_on);
  flat_param.device_shard.Free(context_->builder, streams.pre_unshard, used_on);
}

void FlatParamHandle::ToCpu() {
  ProgramBuilder& builder = context_->builder;
  FlatStorage& unsharded = PaddedUnshardedFlatParam();
  FlatTensor& host = flat_param.summoned_on_host;
  host.Allocate(builder,
                context_->FlatBuffer(id_, BufferRole::kParamUnsharded, unit().orig_dtype, config().numel,
                                     "host", MemoryKind::kHost),
                kHost);
  builder.Move(InstructionKind::kCopyToHost, unsharded.buffer, host.buffer, kCompute);
  context_->SynchronizeStream(kCompute, context_->EventName(id_, "summoned"));
  builder.Emit(InstructionKind::kBindUnsharded, -1).src = host.buffer;
  unsharded.Free(builder, kCompute);
}

void FlatParamHandle::FromCpu() {
  if (!flat_param.summoned_on_host.exists()) return;
  ProgramBuilder& builder = context_->builder;
  FlatStorage& unsharded = PaddedUnshardedFlatParam();
  unsharded.Allocate(builder, kCompute);
  builder.Move(InstructionKind::kCopyToDevice, flat_param.summoned_on_host.buffer, unsharded.buffer,
               kCompute);
  context_->SynchronizeStream(kCompute, context_->EventName(id_, "summoned"));
  builder.Emit(InstructionKind::kBindUnsharded, -1).src = unsharded.buffer;
  flat_param.summoned_on_host.Free(builder, kHost);
}

void FlatParamHandle::SetPrefetched(std::optional<UnitCall> views) {
  SHARDPLAN_ASSERT(!prefetched, "HandleToPrefetch leaves out what is prefetched");
  prefetched = true;
  prefetched_views = views;
}

void FlatParamHandle::ClearPrefetched() {
  prefetched = false;
  prefetched_views.reset();
}

}  // namespace shardplan::fsdp1
