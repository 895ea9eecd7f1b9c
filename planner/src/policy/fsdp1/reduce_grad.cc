// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/reduce_grad.h"

#include <optional>
#include <utility>
#include <vector>

#include "policy/fsdp1/flat_param_grad.h"
#include "policy/gradient_division.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp1 {
namespace {

double DataParallelRanks(const FlatParamHandle& handle) {
  const UnitChoice& choice = handle.context().partition.units[handle.id()];
  return static_cast<double>(choice.shard_size * choice.replicate_size);
}

// A communication hook has a state of its own with the defaults.
double GradientPredivideFactor(const FlatParamHandle& handle) {
  const Fsdp1Knobs& knobs = handle.context().strategy.fsdp1;
  if (knobs.gradient_predivide_factor && knobs.comm_hook == Fsdp1CommHook::kNone) {
    return *knobs.gradient_predivide_factor;
  }
  return PredivideFactor(DataParallelRanks(handle));
}

double GradientPostdivideFactor(const FlatParamHandle& handle) {
  const Fsdp1Knobs& knobs = handle.context().strategy.fsdp1;
  if (knobs.gradient_postdivide_factor && knobs.comm_hook == Fsdp1CommHook::kNone) {
    return *knobs.gradient_postdivide_factor;
  }
  // Set when FSDP1 is constructed: the other factor's later change does not change it.
  const double ranks = DataParallelRanks(handle);
  return ranks / PredivideFactor(ranks);
}

void DivIfNeeded(ProgramBuilder& builder, BufferId buffer, double divisor, StreamId stream) {
  if (divisor <= 1) return;
  Instruction& scale = builder.Emit(InstructionKind::kGradScale, stream);
  scale.src = buffer;
  scale.divisor = divisor;
}

void AllReduce(ProgramBuilder& builder, BufferId buffer, CommunicatorId group, StreamId stream) {
  Instruction& reduce = builder.Emit(InstructionKind::kAllReduce, stream);
  reduce.src = buffer;
  reduce.communicator = group;
}

// NO_SHARD's gradient that was reduced and added to, to be reduced again: the name is free for the result.
BufferId TakeReducedGrad(FlatParamHandle& handle) {
  ProgramBuilder& builder = handle.context().builder;
  SHARDPLAN_ASSERT(!handle.config().sharded && handle.flat_param.has_sharded_grad,
                   "autograd has added to .grad, or without sharding to the reduced gradient");
  const BufferId reduced = ShardedGrad(handle);
  const BufferId sum = handle.context().FlatBuffer(handle.id(), BufferRole::kGradUnshardedAccumulated,
                                                   ShardedGradDType(handle), handle.unit().flat_numel, "sum");
  const StreamId stream = handle.context().streams.unshard;
  builder.Move(InstructionKind::kGradCast, reduced, sum, stream);  // a view
  builder.Free(reduced, stream);
  handle.flat_param.has_sharded_grad = false;
  return sum;
}

BufferId TakeGrad(FlatParamHandle& handle) {
  if (!handle.flat_param.grad.exists()) return TakeReducedGrad(handle);
  return std::exchange(handle.flat_param.grad.buffer, -1);
}

// The gradient on its way to the reduction: new buffers on the post-backward stream, dropped when the hook
// returns.
struct ReduceInput {
  FlatParamHandle& handle;
  BufferId grad = -1;
  std::vector<BufferId> temporaries;

  void MoveTo(InstructionKind kind, DType dtype, std::int64_t numel, std::string_view suffix = {}) {
    const Context& context = handle.context();
    const StreamId stream = context.streams.post_backward;
    const BufferId next =
        context.FlatBuffer(handle.id(), BufferRole::kReduceScatterInput, dtype, numel, suffix);
    context.builder.Allocate(next, stream);
    context.builder.Move(kind, grad, next, stream);
    temporaries.push_back(next);
    grad = next;
  }
};

// _get_reduce_scatter_tensors pads to equal chunks, FSDP1 casts before and a communication hook after that.
ReduceInput MakeReduceInput(FlatParamHandle& handle, BufferId unsharded) {
  const Context& context = handle.context();
  const std::int64_t numel = handle.config().numel, padded = handle.unit().flat_numel;
  const DType grad_dtype = context.builder.plan().buffers[unsharded].dtype;
  const DType reduce_dtype = ReduceDType(handle);
  const bool casts = grad_dtype != reduce_dtype, hook_casts = LowPrecisionHookEnabled(context);
  const bool pads = handle.config().sharded && numel != padded;
  ReduceInput input{handle, unsharded, {}};
  if (casts && !hook_casts) input.MoveTo(InstructionKind::kGradCast, reduce_dtype, numel);
  if (pads) {
    input.MoveTo(InstructionKind::kGradCopyIn, hook_casts ? grad_dtype : reduce_dtype, padded, "padded");
  }
  if (casts && hook_casts) input.MoveTo(InstructionKind::kGradCast, reduce_dtype, pads ? padded : numel);
  return input;
}

// Overwrites the gradient of an earlier backward that is still in host memory.
void OffloadGrad(FlatParamHandle& handle, BufferId grad, StreamId stream) {
  const Context& context = handle.context();
  context.builder.Move(InstructionKind::kCopyToHost, grad, handle.flat_param.cpu_grad.buffer, stream);
  handle.flat_param.device_grad = {grad};
  // A step in the backward, and NO_SHARD, copy with the host waiting.
  if (!handle.config().sharded || context.strategy.optimizer.in_backward) {
    context.SynchronizeStream(stream, context.EventName(handle.id(), "offload"));
  }
}

// With a step in the backward: steps the parameters that this rank holds a piece of, drops their gradients.
void PostBackwardUseShardedGradViews(FlatParamHandle& handle, StreamId stream) {
  const Context& context = handle.context();
  PrepareGradientForOptim(handle, stream);
  std::vector<std::int32_t> trainable;
  for (std::size_t p = 0; p < handle.unit().parameters.size(); ++p) {
    if (handle.unit().parameters[p].requires_grad) trainable.push_back(static_cast<std::int32_t>(p));
  }
  context.optimizer.StepParameters(handle.id(), handle.config().offloads ? kHost : stream,
                                   std::move(trainable));
  context.builder.SetUnit(handle.id());
  context.builder.SetReason("post_backward");
  context.builder.Emit(InstructionKind::kZeroGrad, kHost);
  handle.flat_param.has_sharded_grad = handle.flat_param.sharded_grad_is_low_precision =
      handle.flat_param.cpu_grad.allocated = false;
}

// _cast_grad_to_param_dtype, _accumulate_sharded_grad: `reduced` becomes the sharded gradient, or is added to
// it.
void AccumulateShardedGrad(FlatParamHandle& handle, BufferId reduced, StreamId stream) {
  const Context& context = handle.context();
  ProgramBuilder& builder = context.builder;
  const DType dtype = ShardedGradDType(handle);
  const BufferId grad = ShardedGrad(handle);
  const bool casts = ReduceDType(handle) != dtype;
  // An offloaded gradient is on the host by now: nothing is added to it.
  const bool accumulates = handle.flat_param.has_sharded_grad && !handle.config().offloads;
  if (!accumulates) {
    if (casts) builder.Allocate(grad, stream);
    builder.Move(InstructionKind::kGradCast, reduced, grad, stream);
  } else if (casts) {
    const BufferId cast = context.FlatBuffer(handle.id(), BufferRole::kReduceScatterOutput, dtype,
                                             handle.shard_numel(), "cast");
    builder.Allocate(cast, stream);
    builder.Move(InstructionKind::kGradCast, reduced, cast, stream);
    builder.Move(InstructionKind::kGradAccumulate, cast, grad, stream);
    builder.Free(cast, stream);
  } else {
    builder.Move(InstructionKind::kGradAccumulate, reduced, grad, stream);
  }
  handle.flat_param.has_sharded_grad = true;
}

void PostReduceGradCallback(FlatParamHandle& handle, StreamId stream) {
  if (handle.config().offloads) OffloadGrad(handle, ShardedGrad(handle), stream);
  if (handle.context().strategy.optimizer.in_backward) PostBackwardUseShardedGradViews(handle, stream);
}

// _reduce_grad, of a sharded strategy.
void ReduceGradSharded(FlatParamHandle& handle, BufferId grad) {
  const Context& context = handle.context();
  ProgramBuilder& builder = context.builder;
  const StreamId post_backward = context.streams.post_backward;
  const BufferId output = context.FlatBuffer(handle.id(), BufferRole::kReduceScatterOutput,
                                             ReduceDType(handle), handle.shard_numel());
  builder.Allocate(output, post_backward);
  DivIfNeeded(builder, grad, GradientPredivideFactor(handle), post_backward);
  builder.Move(InstructionKind::kReduceScatter, grad, output, post_backward).communicator =
      handle.unit().shard_communicator;
  StreamId stream = post_backward;
  std::vector<StreamId> used_on;
  if (handle.unit().replicate_communicator >= 0) {  // hybrid sharding
    stream = context.streams.all_reduce;
    used_on.push_back(stream);
    builder.WaitStream(stream, post_backward, context.EventName(handle.id(), "all_reduce_input"));
    AllReduce(builder, output, handle.unit().replicate_communicator, stream);
  }
  DivIfNeeded(builder, output, GradientPostdivideFactor(handle), stream);
  AccumulateShardedGrad(handle, output, stream);
  PostReduceGradCallback(handle, stream);
  builder.Free(output, post_backward, std::move(used_on));
}

void ReduceGradNoShard(FlatParamHandle& handle, BufferId grad) {
  const Context& context = handle.context();
  const StreamId stream = context.streams.post_backward;
  DivIfNeeded(context.builder, grad, GradientPredivideFactor(handle), stream);
  if (handle.unit().replicate_communicator >= 0) {
    AllReduce(context.builder, grad, handle.unit().replicate_communicator, stream);
  }
  DivIfNeeded(context.builder, grad, GradientPostdivideFactor(handle), stream);
  AccumulateShardedGrad(handle, grad, stream);
  PostReduceGradCallback(handle, stream);
}

}  // namespace

void ReduceGrad(FlatParamHandle& handle, bool engine_holds) {
  const Context& context = handle.context();
  const StreamId stream = context.streams.post_backward;
  const BufferId unsharded = TakeGrad(handle);
  ReduceInput input = MakeReduceInput(handle, unsharded);
  if (handle.config().sharded) {
    ReduceGradSharded(handle, input.grad);
  } else {
    ReduceGradNoShard(handle, input.grad);
  }
  for (auto buffer = input.temporaries.rbegin(); buffer != input.temporaries.rend(); ++buffer) {
    context.builder.Free(*buffer, stream);
  }
  // Held by the engine, which called the hook, it goes when that is over.
  std::optional<InstructionLabel> label;
  if (engine_holds) label.emplace(context.builder, handle.id(), "hook_returned");
  context.builder.Free(unsharded, context.streams.unshard,
                       Context::RecordStream(stream, context.streams.unshard));
}

}  // namespace shardplan::fsdp1
