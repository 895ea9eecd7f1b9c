// Flat parameters: unshard, reshard, prefetch, reduce (_runtime_utils.py, _flat_param.py, _limiter_utils.py).
#include <fmt/format.h>

#include <algorithm>

#include "fsdp1_policy.h"
#include "layout.h"

namespace shardplan {
namespace {

constexpr StreamId kCompute = 0;
// _FreeEventQueue._max_num_inflight_all_gathers
constexpr std::size_t kMaxInflightAllGathers = 2;

// Default gradient predivide factor: about the square root of the ranks, a power of two.
std::int64_t PredivideFactor(std::int64_t ranks) {
  std::int64_t factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  return factor;
}

}  // namespace

void Fsdp1Policy::Unshard(UnitId id, std::string_view reason) {
  Handle& handle = handles_[id];
  const UnitId caller = builder_.unit();
  const std::string caller_reason = builder_.reason();
  builder_.SetUnit(id);
  builder_.SetReason(reason);
  const bool gathers = Sharded() && !handle.unsharded_allocated;
  const bool casts = handle.casts_params && (gathers || !Sharded());
  if (casts) {
    builder_.Allocate(handle.low_precision, pre_unshard_stream_);
    builder_.Move(InstructionKind::kCopyIn, handle.param_sharded, handle.low_precision, pre_unshard_stream_);
    builder_.WaitStream(unshard_stream_, pre_unshard_stream_, EventName(id, "pre_unshard"));
  }
  if (strategy_.fsdp1.limit_all_gathers && free_events_.size() >= kMaxInflightAllGathers) {
    builder_.HostWait(free_events_.front());
    free_events_.pop_front();
  }
  BufferId bound = handle.param_unsharded;
  if (gathers) {
    builder_.Allocate(handle.param_unsharded, unshard_stream_);
    builder_
        .Move(InstructionKind::kAllGather, casts ? handle.low_precision : handle.param_sharded,
              handle.param_unsharded, unshard_stream_)
        .communicator = UnitOf(id).shard_communicator;
    handle.unsharded_allocated = true;
  } else if (!Sharded()) {
    bound = casts ? handle.low_precision : handle.param_sharded;
  }
  builder_.Emit(InstructionKind::kBindUnsharded, -1).src = bound;
  if (Sharded() || casts) handle.points_to_shard = false;
  if (casts && Sharded()) builder_.Free(handle.low_precision, pre_unshard_stream_, {unshard_stream_});
  builder_.SetUnit(caller);
  builder_.SetReason(caller_reason);
}

void Fsdp1Policy::WaitForUnshard(UnitId id) {
  builder_.WaitStream(kCompute, unshard_stream_, EventName(id, "unshard"));
}

void Fsdp1Policy::Reshard(UnitId id, bool free, bool grad_enabled) {
  Handle& handle = handles_[id];
  const bool low_precision_bound = !Sharded() && handle.casts_params && !handle.points_to_shard;
  builder_.Emit(InstructionKind::kBindSharded, -1).src = handle.param_sharded;
  handle.skipped_sharded_views = strategy_.fsdp1.use_orig_params && grad_enabled && Sharded() &&
                                 handle.training == TrainingState::kForward && !ReshardsAfterForward();
  handle.points_to_shard = true;
  if (free && handle.unsharded_allocated) {
    builder_.Free(handle.param_unsharded, unshard_stream_, {kCompute});
    handle.unsharded_allocated = false;
  }
  if (free && strategy_.fsdp1.limit_all_gathers) {
    std::string name = fmt::format("free.{}", frees_in_step_++);
    while (std::find(free_events_.begin(), free_events_.end(), builder_.Event(name)) != free_events_.end()) {
      name += ".again";
    }
    free_events_.push_back(builder_.Event(name));
    builder_.Record(free_events_.back(), kCompute);
  }
  if (low_precision_bound) builder_.Free(handle.low_precision, pre_unshard_stream_, {kCompute});
  handle.prefetched = false;
}

void Fsdp1Policy::PostBackwardReshard(UnitId id) {
  Reshard(id, FreesInBackward());
  Prefetch(id, /*forward=*/false);
}

UnitId Fsdp1Policy::PrefetchTarget(UnitId current) const {
  const Handle& handle = handles_[current];
  const Fsdp1BackwardPrefetch backward = strategy_.fsdp1.backward_prefetch;
  const bool now =
      (handle.training == TrainingState::kBackwardPre && backward == Fsdp1BackwardPrefetch::kPre) ||
      (handle.training == TrainingState::kBackwardPost && backward == Fsdp1BackwardPrefetch::kPost);
  if (now) {
    if (!handle.post_forward_index || *handle.post_forward_index == 0) return -1;
    const UnitId target = post_forward_order_[*handle.post_forward_index - 1];
    return handles_[target].needs_pre_backward_unshard && !handles_[target].prefetched ? target : -1;
  }
  if (handle.training != TrainingState::kForward || !strategy_.fsdp1.forward_prefetch) return -1;
  if (!handle.pre_forward_index) return -1;
  const std::size_t index = *handle.pre_forward_index + 1;
  if (index >= pre_forward_order_.size()) return -1;
  const UnitId target = pre_forward_order_[index];
  return handles_[target].needs_pre_forward_unshard && !handles_[target].prefetched ? target : -1;
}

void Fsdp1Policy::Prefetch(UnitId current, bool forward) {
  const UnitId target = PrefetchTarget(current);
  if (target < 0) return;
  Handle& handle = handles_[target];
  Unshard(target, forward ? "prefetch_forward" : "prefetch_backward");
  if (forward) handle.views_made_in = current;
  handle.prefetched = true;
}

BufferId Fsdp1Policy::GradBuffer(UnitId id, const std::set<std::int32_t>& parameters) {
  const Unit& unit = UnitOf(id);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(unit.param_dtype)});
  }
  return builder_.UnitBuffer(id, BufferRole::kGradUnsharded, unit.param_dtype, std::move(parts),
                             {parameters.begin(), parameters.end()});
}

// What autograd does before the hook: the gradients of the views become, or are added to, flat_param.grad.
void Fsdp1Policy::GatherFlatGrad(UnitId id) {
  Handle& handle = handles_[id];
  const DType dtype = UnitOf(id).param_dtype;
  const BufferId views = GradBuffer(id, handle.grads);
  const BufferId flat = FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, dtype, handle.numel);
  const BufferId made =
      handle.has_flat_grad ? FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, dtype, handle.numel, "new")
                           : flat;
  builder_.Allocate(made, kCompute);
  builder_.Move(InstructionKind::kGradCopyIn, views, made, kCompute);
  builder_.Free(views, kCompute);
  if (handle.has_flat_grad) {
    builder_.Move(InstructionKind::kGradAccumulate, made, flat, kCompute);
    builder_.Free(made, kCompute);
  }
  handle.grads.clear();
  handle.has_flat_grad = true;
}

void Fsdp1Policy::PostBackward(UnitId id, std::int32_t microbatch) {
  Handle& handle = handles_[id];
  handle.grads_done = false;
  builder_.BeginTrigger(TriggerKind::kPostBackward, id, microbatch);
  builder_.SetReason("autograd");
  GatherFlatGrad(id);
  handle.training = TrainingState::kBackwardPost;
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
  const BufferId flat = FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, unit.param_dtype, handle.numel);
  handle.has_flat_grad = false;
  std::vector<BufferId> temporaries;  // on the post-backward stream, dropped when the hook returns
  BufferId grad = flat;
  if (unit.reduce_dtype != unit.param_dtype) {
    grad = FlatBuffer(id, BufferRole::kReduceScatterInput, unit.reduce_dtype, handle.numel);
    builder_.Allocate(grad, post_backward_stream_);
    builder_.Move(InstructionKind::kGradCast, flat, grad, post_backward_stream_);
    temporaries.push_back(grad);
  }
  if (!Sharded()) {
    ReduceGradNoShard(id, grad);
  } else {
    if (handle.numel != unit.flat_numel) {
      const BufferId padded =
          FlatBuffer(id, BufferRole::kReduceScatterInput, unit.reduce_dtype, unit.flat_numel, "padded");
      builder_.Allocate(padded, post_backward_stream_);
      builder_.Move(InstructionKind::kGradCopyIn, grad, padded, post_backward_stream_);
      temporaries.push_back(padded);
      grad = padded;
    }
    const BufferId output = FlatBuffer(id, BufferRole::kReduceScatterOutput, unit.reduce_dtype,
                                       unit.flat_numel / partition_.shard_size);
    builder_.Allocate(output, post_backward_stream_);
    const std::int64_t ranks = partition_.shard_size * partition_.replicate_size;
    const std::int64_t pre = PredivideFactor(ranks);
    Scale(grad, static_cast<double>(pre), post_backward_stream_);
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
    Scale(output, static_cast<double>(ranks) / static_cast<double>(pre), stream);
    DeliverGrad(id, output, stream, post_backward_stream_);
  }
  for (auto buffer = temporaries.rbegin(); buffer != temporaries.rend(); ++buffer) {
    builder_.Free(*buffer, post_backward_stream_);
  }
  builder_.Free(flat, kCompute, {post_backward_stream_});
}

void Fsdp1Policy::ReduceGradNoShard(UnitId id, BufferId grad) {
  const Unit& unit = UnitOf(id);
  const std::int64_t ranks = partition_.shard_size * partition_.replicate_size;
  const std::int64_t pre = PredivideFactor(ranks);
  Scale(grad, static_cast<double>(pre), post_backward_stream_);
  if (unit.replicate_communicator >= 0) {
    Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, post_backward_stream_);
    reduce.src = grad;
    reduce.communicator = unit.replicate_communicator;
  }
  Scale(grad, static_cast<double>(ranks) / static_cast<double>(pre), post_backward_stream_);
  DeliverGrad(id, grad, post_backward_stream_, -1);
}

// `allocated_on` is the pool of `output`, -1 when the caller drops it.
void Fsdp1Policy::DeliverGrad(UnitId id, BufferId output, StreamId stream, StreamId allocated_on) {
  Handle& handle = handles_[id];
  const Unit& unit = UnitOf(id);
  const std::int64_t numel = unit.flat_numel / (Sharded() ? partition_.shard_size : 1);
  const BufferId grad = FlatBuffer(id, BufferRole::kGradSharded, unit.orig_dtype, numel);
  const bool casts = unit.reduce_dtype != unit.orig_dtype;
  if (!handle.has_sharded_grad) {
    if (casts) builder_.Allocate(grad, stream);
    builder_.Move(InstructionKind::kGradCast, output, grad, stream);
  } else if (casts) {
    const BufferId cast = FlatBuffer(id, BufferRole::kReduceScatterOutput, unit.orig_dtype, numel, "cast");
    builder_.Allocate(cast, stream);
    builder_.Move(InstructionKind::kGradCast, output, cast, stream);
    builder_.Move(InstructionKind::kGradAccumulate, cast, grad, stream);
    builder_.Free(cast, stream);
  } else {
    builder_.Move(InstructionKind::kGradAccumulate, output, grad, stream);
  }
  handle.has_sharded_grad = true;
  if (allocated_on < 0) return;
  std::vector<StreamId> used_on;
  if (stream != allocated_on) used_on.push_back(stream);
  builder_.Free(output, allocated_on, std::move(used_on));
}

}  // namespace shardplan
