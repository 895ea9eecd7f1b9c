// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/flat_param_grad.h"

#include <utility>

#include "shardplan/schemas/assert.h"
#include "units/layout.h"

namespace shardplan::fsdp1 {
namespace {

BufferId ViewGrads(const FlatParamHandle& handle) {
  const DType dtype = GradDType(handle);
  const std::set<std::int32_t>& parameters = handle.flat_param.view_grads;
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(handle.unit().parameters[p]) * SizeBytes(dtype)});
  }
  return handle.context().builder.UnitBuffer(handle.id(), BufferRole::kGradUnsharded, dtype, std::move(parts),
                                             {parameters.begin(), parameters.end()});
}

// Zeros that autograd makes for the pieces of the flat parameter that have no gradient: padding, and
// parameters that this backward does not reach. -1: all have one.
BufferId ZerosForGrad(const FlatParamHandle& handle) {
  const DType dtype = GradDType(handle);
  const std::vector<UnitParameter>& parameters = handle.unit().parameters;
  std::vector<Bytes> pieces;
  std::int64_t end = 0;
  const auto add = [&](std::int64_t numel) {
    if (numel > 0) pieces.push_back(Bytes{numel * SizeBytes(dtype)});
  };
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    add(parameters[p].flat_offset - end);
    end = parameters[p].flat_offset + Numel(parameters[p]);
    if (!handle.flat_param.view_grads.contains(static_cast<std::int32_t>(p))) add(Numel(parameters[p]));
  }
  add(handle.config().numel - end);
  if (pieces.empty()) return -1;
  return handle.context().builder.UnitBuffer(handle.id(), BufferRole::kGradUnshardedAccumulated, dtype,
                                             std::move(pieces), {}, "zeros");
}

BufferId ShardedGradInOriginalDType(const FlatParamHandle& handle) {
  return handle.context().FlatBuffer(handle.id(), BufferRole::kGradSharded, handle.unit().orig_dtype,
                                     handle.shard_numel());
}

BufferId ShardedGradInLowPrecision(const FlatParamHandle& handle) {
  return handle.context().FlatBuffer(handle.id(), BufferRole::kGradSharded, handle.unit().param_dtype,
                                     handle.shard_numel(), "low_precision");
}

void CastShardedGrad(const FlatParamHandle& handle, BufferId from, BufferId to, StreamId stream) {
  ProgramBuilder& builder = handle.context().builder;
  builder.Allocate(to, stream);
  builder.Move(InstructionKind::kGradCast, from, to, stream);
  builder.Free(from, stream);
}

// All ranks add up how many have no gradient; the host reads the sum.
void CountRanksWithoutGrad(const Context& context, CommunicatorId group, BufferId count) {
  ProgramBuilder& builder = context.builder;
  const BufferId own = builder.AddBuffer({.name = "summon_full_params.own",
                                          .role = BufferRole::kOrderCheck,
                                          .dtype = DType::kInt32,
                                          .parts_bytes = {Bytes{SizeBytes(DType::kInt32)}},
                                          .memory = MemoryKind::kHost,
                                          .persistent = true});
  builder.Allocate(count, kCompute);
  builder.Move(InstructionKind::kCopyToDevice, own, count, kCompute);
  Instruction& reduce = builder.Emit(InstructionKind::kAllReduce, kCompute);
  reduce.src = count;
  reduce.communicator = group;
  context.SynchronizeStream(kCompute, "summon_full_params.counted");
}

}  // namespace

DType GradDType(const FlatParamHandle& handle) {
  return handle.ForcesFullPrecision() ? handle.unit().orig_dtype : handle.unit().param_dtype;
}

DType ReduceDType(const FlatParamHandle& handle) {
  const Fsdp1CommHook hook = handle.context().strategy.fsdp1.comm_hook;
  if (hook == Fsdp1CommHook::kFp16Compress) return DType::kFloat16;
  if (hook == Fsdp1CommHook::kBf16Compress) return DType::kBFloat16;
  return handle.ForcesFullPrecision() ? GradDType(handle) : handle.unit().reduce_dtype;
}

DType ShardedGradDType(const FlatParamHandle& handle) {
  const Context& context = handle.context();
  const bool keeps = !handle.config().sharded &&
                     context.partition.units[handle.id()].mixed_precision.keep_low_precision_grads;
  return keeps && !LowPrecisionHookEnabled(context) ? ReduceDType(handle) : handle.unit().orig_dtype;
}

bool LowPrecisionHookEnabled(const Context& context) {
  const Fsdp1CommHook hook = context.strategy.fsdp1.comm_hook;
  return hook == Fsdp1CommHook::kFp16Compress || hook == Fsdp1CommHook::kBf16Compress;
}

BufferId ShardedGrad(const FlatParamHandle& handle) {
  return handle.context().FlatBuffer(handle.id(), BufferRole::kGradSharded, ShardedGradDType(handle),
                                     handle.shard_numel());
}

BufferId AccumulateGrad(FlatParamHandle& handle) {
  FlatParameter& flat_param = handle.flat_param;
  ProgramBuilder& builder = handle.context().builder;
  const StreamId stream = handle.context().streams.unshard;
  const auto flat_buffer = [&](std::string_view suffix) {
    return handle.context().FlatBuffer(handle.id(), BufferRole::kGradUnshardedAccumulated, GradDType(handle),
                                       handle.config().numel, suffix);
  };
  SHARDPLAN_ASSERT(!flat_param.view_grads.empty(), "the node runs when a view has a gradient");
  const BufferId views = ViewGrads(handle);
  builder.WaitStream(stream, kCompute, handle.context().EventName(handle.id(), "view_grads"));
  // Without sharding a gradient that was reduced is still the one that autograd adds to.
  const bool adds_to_reduced =
      !handle.config().sharded && flat_param.has_sharded_grad && !handle.config().offloads;
  const bool adds = flat_param.grad.exists() || adds_to_reduced;
  const BufferId flat = flat_param.grad.exists() ? flat_param.grad.buffer : flat_buffer({});
  const BufferId made = adds ? flat_buffer("new") : flat;
  const BufferId zeros = ZerosForGrad(handle);
  if (zeros >= 0) builder.Allocate(zeros, stream);
  builder.Allocate(made, stream);
  builder.Move(InstructionKind::kGradCopyIn, views, made, stream);
  if (zeros >= 0) builder.Free(zeros, stream);
  builder.Free(views, kCompute, Context::RecordStream(stream, kCompute));
  flat_param.contributions.emplace_back(flat_param.view_grads.begin(), flat_param.view_grads.end());
  flat_param.view_grads.clear();
  if (!adds) {
    flat_param.grad.buffer = made;
    return -1;
  }
  builder.Move(InstructionKind::kGradAccumulate, made, adds_to_reduced ? ShardedGrad(handle) : flat, stream);
  return made;
}

void FreeAddedGrad(FlatParamHandle& handle, BufferId added) {
  if (added < 0) return;
  const Context& context = handle.context();
  const InstructionLabel label(context.builder, handle.id(), "hook_returned");
  context.builder.Free(added, context.streams.unshard);
}

void PrepareGradientForBackward(FlatParamHandle& handle) {
  FlatParameter& flat_param = handle.flat_param;
  if (handle.config().sharded && !handle.config().offloads && flat_param.has_sharded_grad) {
    flat_param.has_saved_grad = true;
  }
  if (!flat_param.sharded_grad_is_low_precision) return;
  CastShardedGrad(handle, ShardedGradInLowPrecision(handle), ShardedGradInOriginalDType(handle), kCompute);
  flat_param.sharded_grad_is_low_precision = false;
}

void PrepareGradientForOptim(FlatParamHandle& handle, StreamId stream) {
  FlatParameter& flat_param = handle.flat_param;
  const Context& context = handle.context();
  const FlatParamConfig& config = handle.config();
  flat_param.device_grad.Free(context.builder, stream);
  // A gradient that was put aside and that this backward brought nothing for is forgotten.
  if (flat_param.has_saved_grad && !flat_param.post_backward_called) {
    context.builder.Free(ShardedGrad(handle), kCompute);
    flat_param.has_sharded_grad = false;
    context.faults_seen.lost_grad = true;
  }
  flat_param.has_saved_grad = flat_param.post_backward_called = false;
  const bool keeps = config.sharded && !config.offloads && config.casts_params &&
                     !handle.ForcesFullPrecision() &&
                     context.partition.units[handle.id()].mixed_precision.keep_low_precision_grads;
  if (!keeps || !flat_param.has_sharded_grad || flat_param.sharded_grad_is_low_precision) return;
  CastShardedGrad(handle, ShardedGradInOriginalDType(handle), ShardedGradInLowPrecision(handle), stream);
  flat_param.sharded_grad_is_low_precision = true;
}

void UnshardGrad(FlatParamHandle& handle) {
  FlatParameter& flat_param = handle.flat_param;
  const Context& context = handle.context();
  ProgramBuilder& builder = context.builder;
  const CommunicatorId group = handle.unit().shard_communicator;
  const BufferId count = builder.AddBuffer({.name = "summon_full_params.without_gradient",
                                            .role = BufferRole::kOrderCheck,
                                            .dtype = DType::kInt32,
                                            .parts_bytes = {Bytes{SizeBytes(DType::kInt32)}}});
  CountRanksWithoutGrad(context, group, count);
  if (flat_param.has_sharded_grad) {
    const BufferId grad =
        flat_param.sharded_grad_is_low_precision ? ShardedGradInLowPrecision(handle) : ShardedGrad(handle);
    flat_param.summoned_grad.Allocate(
        builder,
        context.FlatBuffer(handle.id(), BufferRole::kGradUnshardedAccumulated,
                           builder.plan().buffers[grad].dtype, handle.unit().flat_numel, "summoned"),
        kCompute);
    builder.Move(InstructionKind::kAllGather, grad, flat_param.summoned_grad.buffer, kCompute).communicator =
        group;
  }
  builder.Free(count, kCompute);
}

void ReshardGrad(FlatParamHandle& handle) {
  handle.flat_param.summoned_grad.Free(handle.context().builder, kCompute);
}

void ResetGrad(FlatParamHandle& handle) {
  FlatParameter& flat_param = handle.flat_param;
  const Context& context = handle.context();
  flat_param.has_sharded_grad = flat_param.sharded_grad_is_low_precision = false;
  flat_param.contributions.clear();
  if (!flat_param.grad.exists()) return;
  context.faults_seen.dropped_unreduced = true;  // of micro-batches that did not reduce
  context.builder.SetUnit(handle.id());
  flat_param.grad.Free(context.builder, context.streams.unshard);
}

}  // namespace shardplan::fsdp1
