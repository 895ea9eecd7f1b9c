// Gradients of flat parameters: post-backward, reduction, what happens to the reduced shard
// (_runtime_utils.py, _flat_param.py, torch/distributed/algorithms/_comm_hooks/default_hooks.py).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "policy/fsdp1/fsdp1_policy.h"
#include "policy/gradient_division.h"
#include "units/layout.h"

namespace shardplan {

// A communication hook has a state of its own with the defaults.
double Fsdp1Policy::PredivideFactor(UnitId id) const {
  const Fsdp1Knobs& knobs = strategy_.fsdp1;
  if (knobs.gradient_predivide_factor && knobs.comm_hook == Fsdp1CommHook::kNone) {
    return *knobs.gradient_predivide_factor;
  }
  return shardplan::PredivideFactor(DataParallelRanks(id));
}

double Fsdp1Policy::PostdivideFactor(UnitId id) const {
  const Fsdp1Knobs& knobs = strategy_.fsdp1;
  if (knobs.gradient_postdivide_factor && knobs.comm_hook == Fsdp1CommHook::kNone) {
    return *knobs.gradient_postdivide_factor;
  }
  // Set when FSDP1 is constructed: the other factor's later change does not change it.
  const double ranks = DataParallelRanks(id);
  return ranks / shardplan::PredivideFactor(ranks);
}

// Of the gradient that autograd makes.
DType Fsdp1Policy::GradDType(UnitId id) const {
  return ForcesFullPrecision() ? UnitOf(id).orig_dtype : UnitOf(id).param_dtype;
}

// That it is reduced in.
DType Fsdp1Policy::ReduceDType(UnitId id) const {
  if (strategy_.fsdp1.comm_hook == Fsdp1CommHook::kFp16Compress) return DType::kFloat16;
  if (strategy_.fsdp1.comm_hook == Fsdp1CommHook::kBf16Compress) return DType::kBFloat16;
  return ForcesFullPrecision() ? GradDType(id) : UnitOf(id).reduce_dtype;
}

// Of the shard that is left. NO_SHARD keeps the dtype of the reduction when it is asked to keep low
// precision.
DType Fsdp1Policy::FinalGradDType(UnitId id) const {
  const bool keeps = !handles_[id].sharded && partition_.units[id].mixed_precision.keep_low_precision_grads;
  return keeps && !CompressesGrads() ? ReduceDType(id) : UnitOf(id).orig_dtype;
}

BufferId Fsdp1Policy::GradBuffer(UnitId id, const std::set<std::int32_t>& parameters) {
  const Unit& unit = UnitOf(id);
  const DType dtype = GradDType(id);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(dtype)});
  }
  return builder_.UnitBuffer(id, BufferRole::kGradUnsharded, dtype, std::move(parts),
                             {parameters.begin(), parameters.end()});
}

BufferId Fsdp1Policy::FlatGrad(UnitId id) {
  return FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, GradDType(id), handles_[id].numel);
}

// What autograd does before the hook: the gradients of the views become, or are added to, flat_param.grad.
void Fsdp1Policy::GatherFlatGrad(UnitId id) {
  Handle& handle = handles_[id];
  const BufferId views = GradBuffer(id, handle.grads);
  const BufferId flat = FlatGrad(id);
  // Without sharding a gradient that was reduced is still the one that autograd adds to.
  const bool adds_to_reduced = !handle.sharded && handle.has_sharded_grad && !handle.offloads;
  const bool adds = handle.has_flat_grad || adds_to_reduced;
  const BufferId made =
      adds ? FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, GradDType(id), handle.numel, "new") : flat;
  const BufferId zeros = ZerosForGrad(id);
  if (zeros >= 0) builder_.Allocate(zeros, kCompute);
  builder_.Allocate(made, kCompute);
  builder_.Move(InstructionKind::kGradCopyIn, views, made, kCompute);
  if (zeros >= 0) builder_.Free(zeros, kCompute);
  builder_.Free(views, kCompute);
  handle.contributions += fmt::format("{};", fmt::join(handle.grads, ","));
  handle.grads.clear();
  if (!adds) {
    handle.has_flat_grad = true;
    return;
  }
  builder_.Move(InstructionKind::kGradAccumulate, made, adds_to_reduced ? ReducedGrad(id) : flat, kCompute);
  builder_.Free(made, kCompute);
}

// What autograd makes for the pieces of the flat parameter that have no gradient: padding, and parameters
// that this backward does not reach. -1: all have one.
BufferId Fsdp1Policy::ZerosForGrad(UnitId id) {
  const Handle& handle = handles_[id];
  const std::vector<UnitParameter>& parameters = UnitOf(id).parameters;
  const DType dtype = GradDType(id);
  std::vector<Bytes> pieces;
  std::int64_t end = 0;
  const auto add = [&](std::int64_t numel) {
    if (numel > 0) pieces.push_back(Bytes{numel * SizeBytes(dtype)});
  };
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    add(parameters[p].flat_offset - end);
    end = parameters[p].flat_offset + Numel(parameters[p]);
    if (!handle.grads.contains(static_cast<std::int32_t>(p))) add(Numel(parameters[p]));
  }
  add(handle.numel - end);
  if (pieces.empty()) return -1;
  return builder_.UnitBuffer(id, BufferRole::kGradUnshardedAccumulated, dtype, std::move(pieces), {},
                             "zeros");
}

BufferId Fsdp1Policy::ReducedGrad(UnitId id) {
  return FlatBuffer(id, BufferRole::kGradSharded, FinalGradDType(id),
                    UnitOf(id).flat_numel / handles_[id].ranks);
}

void Fsdp1Policy::PostBackward(UnitId id, std::int32_t microbatch) {
  Handle& handle = handles_[id];
  builder_.BeginTrigger(TriggerKind::kPostBackward, id, microbatch);
  builder_.SetReason("autograd");
  GatherFlatGrad(id);
  handle.training = TrainingState::kBackwardPost;
  handle.post_backward_called = true;
  builder_.SetReason("post_backward");
  PostBackwardReshard(id);
  if (!sync_gradients_) return;
  builder_.WaitStream(post_backward_stream_, kCompute, EventName(id, "grads_ready"));
  ReduceGrad(id);
}

void Fsdp1Policy::Scale(BufferId buffer, double divisor, StreamId stream) {
  if (divisor <= 1) return;
  Instruction& scale = builder_.Emit(InstructionKind::kGradScale, stream);
  scale.src = buffer;
  scale.divisor = divisor;
}

void Fsdp1Policy::ReduceGrad(UnitId id) {
  Handle& handle = handles_[id];
  const Unit& unit = UnitOf(id);
  const bool adds_to_reduced = !handle.has_flat_grad;
  const BufferId flat = adds_to_reduced ? TakeReducedGrad(id) : FlatGrad(id);
  const DType grad_dtype = builder_.plan().buffers[flat].dtype, reduce_dtype = ReduceDType(id);
  handle.has_flat_grad = false;
  std::vector<BufferId> temporaries;  // on the post-backward stream, dropped when the hook returns
  BufferId grad = flat;
  const auto cast = [&](std::int64_t numel) {
    if (grad_dtype == reduce_dtype) return;
    temporaries.push_back(FlatBuffer(id, BufferRole::kReduceScatterInput, reduce_dtype, numel));
    builder_.Allocate(temporaries.back(), post_backward_stream_);
    builder_.Move(InstructionKind::kGradCast, grad, temporaries.back(), post_backward_stream_);
    grad = temporaries.back();
  };
  const bool pads = handle.sharded && handle.numel != unit.flat_numel;
  if (!CompressesGrads()) cast(handle.numel);
  if (pads) {
    temporaries.push_back(FlatBuffer(id, BufferRole::kReduceScatterInput,
                                     CompressesGrads() ? grad_dtype : reduce_dtype, unit.flat_numel,
                                     "padded"));
    builder_.Allocate(temporaries.back(), post_backward_stream_);
    builder_.Move(InstructionKind::kGradCopyIn, grad, temporaries.back(), post_backward_stream_);
    grad = temporaries.back();
  }
  if (CompressesGrads()) cast(pads ? unit.flat_numel : handle.numel);  // the hook does
  if (handle.sharded) {
    const BufferId output = ReduceScatterGrad(id, grad);
    DeliverGrad(id, output, unit.replicate_communicator >= 0 ? all_reduce_stream_ : post_backward_stream_,
                post_backward_stream_);
  } else {
    ReduceGradNoShard(id, grad);
  }
  for (auto buffer = temporaries.rbegin(); buffer != temporaries.rend(); ++buffer) {
    builder_.Free(*buffer, post_backward_stream_);
  }
  builder_.Free(flat, kCompute, {post_backward_stream_});
}

// A gradient that was reduced and added to, to be reduced again: the name is free for the result.
BufferId Fsdp1Policy::TakeReducedGrad(UnitId id) {
  const BufferId reduced = ReducedGrad(id);
  const BufferId sum =
      FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, FinalGradDType(id), UnitOf(id).flat_numel, "sum");
  builder_.Move(InstructionKind::kGradCast, reduced, sum, kCompute);  // a view
  builder_.Free(reduced, kCompute);
  handles_[id].has_sharded_grad = false;
  return sum;
}

BufferId Fsdp1Policy::ReduceScatterGrad(UnitId id, BufferId grad) {
  const Unit& unit = UnitOf(id);
  const BufferId output =
      FlatBuffer(id, BufferRole::kReduceScatterOutput, ReduceDType(id), unit.flat_numel / handles_[id].ranks);
  builder_.Allocate(output, post_backward_stream_);
  Scale(grad, PredivideFactor(id), post_backward_stream_);
  builder_.Move(InstructionKind::kReduceScatter, grad, output, post_backward_stream_).communicator =
      unit.shard_communicator;
  StreamId stream = post_backward_stream_;
  if (unit.replicate_communicator >= 0) {
    stream = all_reduce_stream_;
    builder_.WaitStream(all_reduce_stream_, post_backward_stream_, EventName(id, "all_reduce_input"));
    Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, stream);
    reduce.src = output;
    reduce.communicator = unit.replicate_communicator;
  }
  Scale(output, PostdivideFactor(id), stream);
  return output;
}

void Fsdp1Policy::ReduceGradNoShard(UnitId id, BufferId grad) {
  const Unit& unit = UnitOf(id);
  Scale(grad, PredivideFactor(id), post_backward_stream_);
  if (unit.replicate_communicator >= 0) {
    Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, post_backward_stream_);
    reduce.src = grad;
    reduce.communicator = unit.replicate_communicator;
  }
  Scale(grad, PostdivideFactor(id), post_backward_stream_);
  DeliverGrad(id, grad, post_backward_stream_, -1);
}

// `allocated_on` is the pool of `output`, -1 when the caller drops it.
void Fsdp1Policy::DeliverGrad(UnitId id, BufferId output, StreamId stream, StreamId allocated_on) {
  Handle& handle = handles_[id];
  const std::int64_t numel = UnitOf(id).flat_numel / handle.ranks;
  const DType dtype = FinalGradDType(id);
  const BufferId grad = ReducedGrad(id);
  const bool casts = ReduceDType(id) != dtype;
  // An offloaded gradient is on the host by now: nothing is added to it.
  const bool accumulates = handle.has_sharded_grad && !handle.offloads;
  if (!accumulates) {
    if (casts) builder_.Allocate(grad, stream);
    builder_.Move(InstructionKind::kGradCast, output, grad, stream);
  } else if (casts) {
    const BufferId cast = FlatBuffer(id, BufferRole::kReduceScatterOutput, dtype, numel, "cast");
    builder_.Allocate(cast, stream);
    builder_.Move(InstructionKind::kGradCast, output, cast, stream);
    builder_.Move(InstructionKind::kGradAccumulate, cast, grad, stream);
    builder_.Free(cast, stream);
  } else {
    builder_.Move(InstructionKind::kGradAccumulate, output, grad, stream);
  }
  handle.has_sharded_grad = true;
  if (handle.offloads) OffloadGrad(id, grad, stream);
  if (strategy_.optimizer.in_backward) StepInBackward(id, stream);
  if (allocated_on < 0) return;
  std::vector<StreamId> used_on;
  if (stream != allocated_on) used_on.push_back(stream);
  builder_.Free(output, allocated_on, std::move(used_on));
}

// _offload_grad. The gradient of an earlier backward that is still in host memory is overwritten.
void Fsdp1Policy::OffloadGrad(UnitId id, BufferId grad, StreamId stream) {
  Handle& handle = handles_[id];
  builder_.Move(InstructionKind::kCopyToHost, grad, handle.host_grad.buffer, stream);
  handle.device_grad = {grad, true};
  // A step in the backward, and NO_SHARD, copy with the host waiting.
  if (!handle.sharded || strategy_.optimizer.in_backward) {
    const EventId copied = builder_.Event(EventName(id, "offload"));
    builder_.Record(copied, stream);
    builder_.HostWait(copied);
  }
}

// _post_backward_use_sharded_grad_views: steps the parameters that this rank holds a piece of, drops their
// gradients.
void Fsdp1Policy::StepInBackward(UnitId id, StreamId stream) {
  Handle& handle = handles_[id];
  FreeCopy(handle.device_grad, stream);
  std::vector<std::int32_t> trainable;
  for (std::size_t p = 0; p < UnitOf(id).parameters.size(); ++p) {
    if (UnitOf(id).parameters[p].requires_grad) trainable.push_back(static_cast<std::int32_t>(p));
  }
  optimizer_.StepParameters(id, handle.offloads ? kHost : stream, std::move(trainable));
  builder_.SetUnit(id);
  builder_.SetReason("post_backward");
  builder_.Emit(InstructionKind::kZeroGrad, kHost);
  handle.has_sharded_grad = handle.host_grad.allocated = false;
}

// prepare_gradient_for_optim: drops the device's copy of an offloaded gradient; with keep_low_precision_grads
// casts the shard to the low precision.
void Fsdp1Policy::FinishGrad(UnitId id) {
  Handle& handle = handles_[id];
  const Unit& unit = UnitOf(id);
  FreeCopy(handle.device_grad, kCompute);
  // A gradient that was put aside and that this backward brought nothing for is forgotten.
  if (handle.saved_grad && !handle.post_backward_called) {
    builder_.Free(ReducedGrad(id), kCompute);
    handle.has_sharded_grad = false;
    lost_grad_ = true;
  }
  handle.saved_grad = handle.post_backward_called = false;
  const bool keeps = handle.sharded && !handle.offloads && handle.casts_params && !ForcesFullPrecision() &&
                     partition_.units[id].mixed_precision.keep_low_precision_grads;
  if (!keeps || !handle.has_sharded_grad || handle.has_low_grad) return;
  const std::int64_t numel = unit.flat_numel / handle.ranks;
  const BufferId grad = FlatBuffer(id, BufferRole::kGradSharded, unit.orig_dtype, numel);
  const BufferId low = FlatBuffer(id, BufferRole::kGradSharded, unit.param_dtype, numel, "low_precision");
  builder_.Allocate(low, kCompute);
  builder_.Move(InstructionKind::kGradCast, grad, low, kCompute);
  builder_.Free(grad, kCompute);
  handle.has_low_grad = true;
}

// prepare_gradient_for_backward: puts the reduced gradient aside. A shard that was kept in the low precision
// is added to in the original dtype.
void Fsdp1Policy::PrepareGrad(UnitId id) {
  Handle& handle = handles_[id];
  handle.saved_grad = handle.saved_grad || (handle.sharded && handle.has_sharded_grad && !handle.offloads);
  if (!handle.has_low_grad) return;
  const Unit& unit = UnitOf(id);
  const std::int64_t numel = unit.flat_numel / handle.ranks;
  const BufferId grad = FlatBuffer(id, BufferRole::kGradSharded, unit.orig_dtype, numel);
  const BufferId low = FlatBuffer(id, BufferRole::kGradSharded, unit.param_dtype, numel, "low_precision");
  builder_.Allocate(grad, kCompute);
  builder_.Move(InstructionKind::kGradCast, low, grad, kCompute);
  builder_.Free(low, kCompute);
  handle.has_low_grad = false;
}

}  // namespace shardplan
