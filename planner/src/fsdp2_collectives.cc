// FSDPParamGroup: unshard, reshard, reduce (_fsdp_param_group.py, _fsdp_collectives.py, _fsdp_param.py).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fsdp2_policy.h"
#include "layout.h"

namespace shardplan {
namespace {

constexpr StreamId kCompute = 0;

std::vector<std::int32_t> AllParameters(const Unit& unit) {
  std::vector<std::int32_t> all(unit.parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

void Fsdp2Policy::Unshard(UnitId unit, bool async, std::string_view reason) {
  Group& group = groups_[unit];
  if (group.pending || group.sharded == ShardedState::kUnsharded) return;
  if (!group.unshard_in_backward && group.training == TrainingState::kPreBackward) return;
  const UnitId caller = builder_.unit();
  const std::string caller_reason = builder_.reason();
  builder_.SetUnit(unit);
  builder_.SetReason(reason);
  if (group.reshard_after_forward_recorded) {
    WaitAllGatherStreams(builder_.Event(EventName(unit, "reshard")));
    group.reshard_after_forward_recorded = false;
  }
  if (ShardRanks(unit) == 1) {
    group.pending = PendingAllGather{};
  } else {
    IssueAllGather(unit, async);
  }
  builder_.SetUnit(caller);
  builder_.SetReason(caller_reason);
}

void Fsdp2Policy::IssueAllGather(UnitId id, bool async) {
  Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const bool own_streams =
      !async && (group.training == TrainingState::kForward || group.training == TrainingState::kPreBackward);
  const StreamId copy_in = own_streams ? copy_in_stream_ : kCompute;
  const StreamId gather = own_streams ? all_gather_stream_ : kCompute;
  const bool post_forward = group.sharded == ShardedState::kShardedPostForward;
  const BufferId shard = post_forward ? group.post_forward_shard : group.param_sharded;
  // A gather over the smaller mesh moves the padding of the whole one too: its shards are cut from that.
  const std::vector<Bytes> gathered = GatheredParts(unit, ShardRanks(id), unit.param_dtype);
  const std::int64_t ranks = post_forward ? group.post_forward_size : ShardRanks(id);
  const std::vector<std::int32_t> all = AllParameters(unit);

  std::vector<BufferId> temporaries;  // dropped when foreach_all_gather returns
  BufferId source = shard;
  if (group.offloads && !post_forward) {
    source = CopyShardsToDevice(id, copy_in, temporaries);
  } else if (group.casts_params) {  // all shards at once into one flat buffer of the low precision
    const Bytes bytes{Sum(gathered).value / ranks};
    source = builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.param_dtype, {bytes}, all,
                                 post_forward ? "post_forward" : "");
    builder_.Allocate(source, copy_in);
    builder_.Move(InstructionKind::kCopyIn, shard, source, copy_in);
    temporaries.push_back(source);
  }
  // A unit that runs twice in a row gathers anew while its last output is still kept.
  const bool kept = comm_.all_gather_state == id &&
                    builder_.plan().buffers[comm_.all_gather_output].name.ends_with("all_gather_output");
  const BufferId output = builder_.UnitBuffer(id, BufferRole::kAllGatherOutput, unit.param_dtype,
                                              {Sum(gathered)}, all, kept ? "again" : "");
  builder_.Allocate(output, copy_in);
  builder_.Move(InstructionKind::kCopyIn, source, output, copy_in).communicator =
      post_forward ? unit.post_forward_communicator : unit.shard_communicator;
  builder_.WaitStream(gather, copy_in, EventName(id, "copy_in"));
  builder_.Move(InstructionKind::kAllGather, output, output, gather).communicator =
      post_forward ? unit.post_forward_communicator : unit.shard_communicator;
  const EventId event = builder_.Event(EventName(id, "all_gather"));
  builder_.Record(event, gather);
  for (const BufferId buffer : temporaries) builder_.Free(buffer, copy_in);
  group.pending = PendingAllGather{output, event, async};
}

// Offloaded shards come to the device parameter by parameter, each cast before the next one comes.
BufferId Fsdp2Policy::CopyShardsToDevice(UnitId id, StreamId stream, std::vector<BufferId>& temporaries) {
  const Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const std::vector<Bytes> copies = ShardParts(unit, ShardRanks(id), unit.orig_dtype);
  const BufferId inputs =
      builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.param_dtype,
                          ShardParts(unit, ShardRanks(id), unit.param_dtype), AllParameters(unit));
  builder_.Allocate(inputs, stream);
  temporaries.push_back(inputs);
  if (!group.casts_params) {
    builder_.Move(InstructionKind::kCopyToDevice, group.param_sharded, inputs, stream);
    return inputs;
  }
  for (std::size_t p = 0; p < copies.size(); ++p) {
    const BufferId copy = builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.orig_dtype, {copies[p]},
                                              {static_cast<std::int32_t>(p)}, fmt::format("device.{}", p));
    builder_.Allocate(copy, stream);
    builder_.Move(InstructionKind::kCopyToDevice, group.param_sharded, copy, stream);
    builder_.Move(InstructionKind::kCopyIn, copy, inputs, stream);
    builder_.Free(copy, stream);
  }
  return inputs;
}

void Fsdp2Policy::WaitAllGatherStreams(EventId event) {
  builder_.Wait(event, copy_in_stream_);
  builder_.Wait(event, all_gather_stream_);
}

void Fsdp2Policy::WaitForUnshard(UnitId unit) {
  Group& group = groups_[unit];
  if (!group.pending) return;
  const PendingAllGather pending = *group.pending;
  const bool single = ShardRanks(unit) == 1;
  const bool forward = group.training == TrainingState::kForward;
  BufferId previous = -1;
  if (forward && comm_.all_gather_state >= 0) {
    WaitAllGatherStreams(builder_.Event(EventName(comm_.all_gather_state, "copy_out")));
    previous = comm_.all_gather_output;
    comm_.all_gather_state = -1;
  }
  if (!single) builder_.Wait(pending.event, kCompute);
  builder_.Allocate(group.param_unsharded, kCompute);
  builder_.Move(InstructionKind::kCopyOut, single ? group.param_sharded : pending.output,
                group.param_unsharded, kCompute);
  if (group.sharded == ShardedState::kShardedPostForward) {
    builder_.Free(group.post_forward_shard, kCompute);
    group.post_forward_shard = -1;
  }
  builder_.Emit(InstructionKind::kBindUnsharded, -1).src = group.param_unsharded;
  group.sharded = ShardedState::kUnsharded;
  const EventId copy_out = builder_.Event(EventName(unit, "copy_out"));
  builder_.Record(copy_out, kCompute);
  if (!pending.async && forward && !single) {
    comm_.all_gather_state = unit;
    comm_.all_gather_output = pending.output;
  } else {
    WaitAllGatherStreams(copy_out);
    if (!single) builder_.Free(pending.output, copy_in_stream_);
  }
  group.pending.reset();
  // The runtime's local variable names the previous result until wait_for_unshard returns.
  if (previous >= 0) {
    const UnitId caller = builder_.unit();
    builder_.SetUnit(-1);
    builder_.Free(previous, copy_in_stream_);
    builder_.SetUnit(caller);
  }
}

void Fsdp2Policy::Reshard(UnitId unit) {
  Group& group = groups_[unit];
  if (group.training == TrainingState::kForward) {
    if (group.post_forward_size == 0) return;
    if (group.post_forward_size != partition_.shard_size) {
      ToShardedPostForward(unit);
      builder_.Record(builder_.Event(EventName(unit, "reshard")), kCompute);
      group.reshard_after_forward_recorded = true;
      return;
    }
  }
  ToSharded(unit);
}

void Fsdp2Policy::ToSharded(UnitId unit) {
  Group& group = groups_[unit];
  if (group.sharded == ShardedState::kSharded) return;
  builder_.Emit(InstructionKind::kBindSharded, -1).src = group.param_sharded;
  if (group.sharded == ShardedState::kUnsharded) builder_.Free(group.param_unsharded, kCompute);
  group.sharded = ShardedState::kSharded;
}

void Fsdp2Policy::ToShardedPostForward(UnitId id) {
  Group& group = groups_[id];
  if (group.sharded == ShardedState::kShardedPostForward) return;
  const Unit& unit = UnitOf(id);
  std::vector<Bytes> parts = GatheredParts(unit, ShardRanks(id), unit.param_dtype);
  for (Bytes& part : parts) part.value /= group.post_forward_size;
  if (group.post_forward_shard >= 0) builder_.Free(group.post_forward_shard, kCompute);
  group.post_forward_shard = builder_.UnitBuffer(id, BufferRole::kParamPostForwardShard, unit.param_dtype,
                                                 std::move(parts), AllParameters(unit));
  builder_.Allocate(group.post_forward_shard, kCompute);
  builder_
      .Move(InstructionKind::kReshardPostForward, group.param_unsharded, group.post_forward_shard, kCompute)
      .communicator = unit.post_forward_communicator;
  builder_.Emit(InstructionKind::kBindSharded, -1).src = group.post_forward_shard;
  builder_.Free(group.param_unsharded, kCompute);
  group.sharded = ShardedState::kShardedPostForward;
}

BufferId Fsdp2Policy::GradBuffer(UnitId id, const std::set<std::int32_t>& parameters, bool accumulated) {
  const Unit& unit = UnitOf(id);
  const DType dtype = accumulated ? unit.reduce_dtype : groups_[id].grad_dtype;
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(dtype)});
  }
  const BufferRole role = accumulated ? BufferRole::kGradUnshardedAccumulated : BufferRole::kGradUnsharded;
  return builder_.UnitBuffer(id, role, dtype, std::move(parts), {parameters.begin(), parameters.end()});
}

void Fsdp2Policy::AddToAccumulatedGrad(UnitId unit) {
  Group& group = groups_[unit];
  if (group.accumulated.empty() || group.grads.empty()) return;
  const BufferId grads = GradBuffer(unit, group.grads, false);
  builder_.Move(InstructionKind::kGradAccumulate, grads, GradBuffer(unit, group.accumulated, true), kCompute);
  builder_.Free(grads, kCompute);
  group.grads.clear();
}

// Without synchronisation gradients wait in the reduce dtype.
void Fsdp2Policy::ToAccumulatedGrad(UnitId unit) {
  Group& group = groups_[unit];
  if (UnitOf(unit).reduce_dtype == group.grad_dtype || group.grads.empty()) return;
  group.accumulated = group.grads;
  const BufferId grads = GradBuffer(unit, group.grads, false);
  const BufferId accumulated = GradBuffer(unit, group.accumulated, true);
  builder_.Allocate(accumulated, kCompute);
  builder_.Move(InstructionKind::kGradCast, grads, accumulated, kCompute);
  builder_.Free(grads, kCompute);
  group.grads.clear();
}

void Fsdp2Policy::PostBackward(UnitId unit, std::string_view reason) {
  Group& group = groups_[unit];
  builder_.SetUnit(unit);
  builder_.SetReason(reason);
  group.training = TrainingState::kPostBackward;
  AddToAccumulatedGrad(unit);
  if (!group.reduce_grads) {
    if (group.reshard_after_backward) Reshard(unit);
    ToAccumulatedGrad(unit);
    return;
  }
  std::set<std::int32_t> with_grad = group.accumulated;
  with_grad.insert(group.grads.begin(), group.grads.end());
  std::vector<BufferId> grads;
  if (!group.accumulated.empty()) grads.push_back(GradBuffer(unit, group.accumulated, true));
  if (!group.grads.empty()) grads.push_back(GradBuffer(unit, group.grads, false));
  group.accumulated.clear();
  group.grads.clear();
  if (group.reshard_after_backward) Reshard(unit);
  if (with_grad.empty()) return;
  if (comm_.reduce_scatter_unit >= 0) {
    builder_.Wait(builder_.Event(EventName(comm_.reduce_scatter_unit, "reduce_scatter")), kCompute);
    builder_.SetUnit(-1);
    builder_.Free(comm_.reduce_scatter_input, kCompute);
    builder_.SetUnit(unit);
    comm_.reduce_scatter_unit = -1;
  }
  WaitForPostBackward(unit);
  ForeachReduce(unit, {with_grad.begin(), with_grad.end()}, grads);
}

void Fsdp2Policy::WaitForPostBackward(UnitId unit) {
  Group& group = groups_[unit];
  if (group.post_reduce_event >= 0) builder_.Wait(group.post_reduce_event, kCompute);
  group.post_reduce_event = -1;
  if (!group.all_reduce) return;
  builder_.Wait(group.all_reduce->event, kCompute);
  if (group.all_reduce->free_input) builder_.Free(group.all_reduce->input, reduce_scatter_stream_);
  group.all_reduce.reset();
}

void Fsdp2Policy::FinalizeBackward(UnitId unit) {
  Group& group = groups_[unit];
  WaitForPostBackward(unit);
  if (group.grad_offload_event >= 0) builder_.HostWait(group.grad_offload_event);
  group.grad_offload_event = -1;
  if (group.pending) {  // gathered for a backward that did not come
    if (group.pending->event >= 0) {
      builder_.Wait(group.pending->event, kCompute);
      builder_.Free(group.pending->output, copy_in_stream_);
    }
    group.pending.reset();
  }
  group.post_forward_indices.clear();
}

Fsdp2Policy::Divide Fsdp2Policy::DivideFactors(UnitId unit) const {
  const DType dtype = UnitOf(unit).reduce_dtype;
  const bool overflow_risk = dtype != DType::kFloat32 && dtype != DType::kBFloat16;
  const auto ranks = static_cast<double>(ShardRanks(unit) * partition_.replicate_size);
  Divide divide;
  if (!overflow_risk && !force_sum_reduction_) {
    if (!gradient_divide_factor_) {
      divide.reduce_scatter = divide.all_reduce = ranks == 1 ? ReduceOp::kSum : ReduceOp::kAverage;
    } else if (*gradient_divide_factor_ == static_cast<double>(ShardRanks(unit))) {
      divide.reduce_scatter = ReduceOp::kAverage;
    } else {
      divide.pre = *gradient_divide_factor_;  // NCCL multiplies while it sums (premul_sum)
    }
    return divide;
  }
  const double factor = gradient_divide_factor_.value_or(ranks);
  if (!overflow_risk) {
    divide.post = factor;
    return divide;
  }
  double pre = 1;  // about the square root of the factor before, the rest after: neither over- nor underflow
  while (std::fmod(factor, pre) == 0 && factor / pre > pre) pre *= 2;
  divide.pre = pre;
  divide.post = factor / pre;
  return divide;
}

BufferId Fsdp2Policy::PartialBuffer(UnitId id, const std::vector<std::int32_t>& parameters) {
  const Unit& unit = UnitOf(id);
  std::int64_t numel = 0;
  for (const std::int32_t p : parameters) numel += PaddedShardNumel(unit.parameters[p], ShardRanks(id));
  return builder_.UnitBuffer(id, BufferRole::kReduceScatterOutput, unit.reduce_dtype,
                             {Bytes{numel * SizeBytes(unit.reduce_dtype)}}, parameters, "partial");
}

void Fsdp2Policy::ForeachReduce(UnitId id, const std::vector<std::int32_t>& parameters,
                                const std::vector<BufferId>& grads) {
  Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const Divide divide = DivideFactors(id);
  const std::int64_t ranks = ShardRanks(id);
  const std::int64_t element = SizeBytes(unit.reduce_dtype);
  std::int64_t numel = 0;  // of the output
  for (const std::int32_t p : parameters) numel += PaddedShardNumel(unit.parameters[p], ranks);

  const BufferId input = builder_.UnitBuffer(id, BufferRole::kReduceScatterInput, unit.reduce_dtype,
                                             {Bytes{numel * ranks * element}}, parameters);
  builder_.Allocate(input, kCompute);
  for (const BufferId grad : grads) builder_.Move(InstructionKind::kGradCopyIn, grad, input, kCompute);
  for (const BufferId grad : grads) builder_.Free(grad, kCompute);
  builder_.WaitStream(reduce_scatter_stream_, kCompute, EventName(id, "grads_ready"));
  const bool partial_only = unit.replicate_communicator >= 0 && !group.all_reduce_grads;
  const bool new_partial = partial_only && group.partial_reduce_output < 0;
  const BufferId output = new_partial
                              ? PartialBuffer(id, parameters)
                              : builder_.UnitBuffer(id, BufferRole::kReduceScatterOutput, unit.reduce_dtype,
                                                    {Bytes{numel * element}}, parameters);
  builder_.Allocate(output, reduce_scatter_stream_);
  const auto scale = [&](const std::optional<double>& factor, BufferId buffer, StreamId stream) {
    if (!factor || *factor == 1) return;
    Instruction& instruction = builder_.Emit(InstructionKind::kGradScale, stream);
    instruction.src = buffer;
    instruction.divisor = *factor;
  };
  scale(divide.pre, input, reduce_scatter_stream_);
  if (ranks > 1) {
    Instruction& reduce =
        builder_.Move(InstructionKind::kReduceScatter, input, output, reduce_scatter_stream_);
    reduce.communicator = unit.shard_communicator;
    reduce.reduce_op = divide.reduce_scatter;
  } else {
    builder_.Move(InstructionKind::kGradCopyIn, input, output, reduce_scatter_stream_);
  }
  builder_.Record(builder_.Event(EventName(id, "reduce_scatter")), reduce_scatter_stream_);
  comm_.reduce_scatter_unit = id;
  comm_.reduce_scatter_input = input;
  group.post_reduce_event = builder_.Event(EventName(id, "post_reduce"));
  if (partial_only) {  // HSDP accumulation: reduced over the shards, not yet over the replicas
    if (new_partial) {
      group.partial_reduce_output = output;
    } else {
      builder_.Move(InstructionKind::kGradAccumulate, output, group.partial_reduce_output,
                    reduce_scatter_stream_);
      builder_.Free(output, reduce_scatter_stream_);
    }
    builder_.Record(group.post_reduce_event, reduce_scatter_stream_);
    return;
  }
  StreamId stream = reduce_scatter_stream_;
  if (unit.replicate_communicator >= 0) {
    if (group.partial_reduce_output >= 0) {
      builder_.Move(InstructionKind::kGradAccumulate, group.partial_reduce_output, output, stream);
    }
    stream = all_reduce_stream_;
    builder_.WaitStream(all_reduce_stream_, reduce_scatter_stream_, EventName(id, "all_reduce_input"));
    Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, stream);
    reduce.src = output;
    reduce.communicator = unit.replicate_communicator;
    reduce.reduce_op = divide.all_reduce;
    const EventId event = builder_.Event(EventName(id, "all_reduce"));
    builder_.Record(event, stream);
    group.all_reduce = AllReduceState{output, event, true};
  }
  scale(divide.post, output, stream);
  DeliverGrad(id, output, stream, parameters);
  builder_.Record(group.post_reduce_event, stream);
  if (group.partial_reduce_output >= 0) {
    builder_.Free(group.partial_reduce_output, reduce_scatter_stream_);
    group.partial_reduce_output = -1;
  }
}

// The reduced gradient becomes, or is added to, the sharded parameters' .grad.
void Fsdp2Policy::DeliverGrad(UnitId id, BufferId output, StreamId stream,
                              const std::vector<std::int32_t>& parameters) {
  Group& group = groups_[id];
  if (group.offloads) return DeliverGradToHost(id, output, stream, parameters);
  const Unit& unit = UnitOf(id);
  const bool casts = unit.reduce_dtype != unit.orig_dtype;
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{PaddedShardNumel(unit.parameters[p], ShardRanks(id)) * SizeBytes(unit.orig_dtype)});
  }
  const BufferId grad = builder_.UnitBuffer(id, BufferRole::kGradSharded, unit.orig_dtype, parts, parameters);
  if (!group.has_sharded_grad) {
    if (casts) builder_.Allocate(grad, stream);
    builder_.Move(InstructionKind::kGradCast, output, grad, stream);
  } else if (casts) {
    const BufferId cast =
        builder_.UnitBuffer(id, BufferRole::kReduceScatterOutput, unit.orig_dtype, parts, parameters, "cast");
    builder_.Allocate(cast, stream);
    builder_.Move(InstructionKind::kGradCast, output, cast, stream);
    builder_.Move(InstructionKind::kGradAccumulate, cast, grad, stream);
    builder_.Free(cast, stream);
  } else {
    builder_.Move(InstructionKind::kGradAccumulate, output, grad, stream);
  }
  group.has_sharded_grad = true;
  // With HSDP the all-reduce's input is kept until the unit's next wait_for_post_backward.
  if (!group.all_reduce) builder_.Free(output, reduce_scatter_stream_);
}

void Fsdp2Policy::DeliverGradToHost(UnitId id, BufferId output, StreamId stream,
                                    const std::vector<std::int32_t>& parameters) {
  Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{PaddedShardNumel(unit.parameters[p], ShardRanks(id)) * SizeBytes(unit.orig_dtype)});
  }
  BufferId reduced = output;
  if (unit.reduce_dtype != unit.orig_dtype) {
    reduced =
        builder_.UnitBuffer(id, BufferRole::kReduceScatterOutput, unit.orig_dtype, parts, parameters, "cast");
    builder_.Allocate(reduced, stream);
    builder_.Move(InstructionKind::kGradCast, output, reduced, stream);
  }
  const bool adds = group.has_sharded_grad;
  const BufferId grad =
      builder_.UnitBuffer(id, BufferRole::kGradHost, unit.orig_dtype, parts, parameters, {}, ShardMemory(id));
  const BufferId arrived = adds ? builder_.UnitBuffer(id, BufferRole::kGradHost, unit.orig_dtype, parts,
                                                      parameters, "new", ShardMemory(id))
                                : grad;
  builder_.Allocate(arrived, -1);
  builder_.Move(InstructionKind::kCopyToHost, reduced, arrived, stream);
  const EventId event = builder_.Event(EventName(id, "grad_offload"));
  builder_.Record(event, stream);
  // The copy overlaps only into pinned memory, and not when the host adds it to an earlier gradient.
  if (strategy_.pin_memory && !adds) {
    group.grad_offload_event = event;
  } else {
    builder_.HostWait(event);
  }
  if (adds) {
    builder_.Move(InstructionKind::kGradAccumulate, arrived, grad, -1);
    builder_.Free(arrived, -1);
  }
  group.has_sharded_grad = true;
  if (reduced != output) builder_.Free(reduced, stream);
  if (!group.all_reduce) builder_.Free(output, reduce_scatter_stream_);
}

}  // namespace shardplan
