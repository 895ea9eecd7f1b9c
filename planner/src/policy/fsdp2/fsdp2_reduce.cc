// FSDPParamGroup.post_backward and foreach_reduce (_fsdp_param_group.py, _fsdp_collectives.py).
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "policy/fsdp2/fsdp2_policy.h"
#include "policy/gradient_division.h"
#include "units/layout.h"

namespace shardplan {
BufferId Fsdp2Policy::GradBuffer(UnitId id, const std::set<std::int32_t>& parameters, bool accumulated) {
  const Unit& unit = UnitOf(id);
  const DType dtype = accumulated ? unit.reduce_dtype : groups_[id].grad_dtype;
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(dtype)});
  }
  const BufferRole role = accumulated ? BufferRole::kGradUnshardedAccumulated : BufferRole::kGradUnsharded;
  const bool single = parameters.size() == 1 && unit.parameters.size() > 1;
  return builder_.UnitBuffer(id, role, dtype, std::move(parts), {parameters.begin(), parameters.end()},
                             single ? fmt::format("p{}", *parameters.begin()) : "");
}

// Of parameters that have both (FSDPParam.accumulate_unsharded_grad_if_needed).
void Fsdp2Policy::AddToAccumulatedGrad(UnitId unit) {
  Group& group = groups_[unit];
  for (const std::int32_t p : group.accumulated) {
    if (group.grads.erase(p) == 0) continue;
    const BufferId grad = GradBuffer(unit, {p}, false);
    builder_.Move(InstructionKind::kGradAccumulate, grad, GradBuffer(unit, {p}, true), kCompute);
    builder_.Free(grad, kCompute);
  }
}

// Without synchronisation gradients wait in the reduce dtype, each cast before the next one
// (FSDPParam.to_accumulated_grad_if_needed).
void Fsdp2Policy::ToAccumulatedGrad(UnitId unit) {
  Group& group = groups_[unit];
  if (UnitOf(unit).reduce_dtype == group.grad_dtype) return;
  for (const std::int32_t p : std::exchange(group.grads, {})) {
    const BufferId grad = GradBuffer(unit, {p}, false);
    const BufferId accumulated = GradBuffer(unit, {p}, true);
    builder_.Allocate(accumulated, kCompute);
    builder_.Move(InstructionKind::kGradCast, grad, accumulated, kCompute);
    builder_.Free(grad, kCompute);
    group.accumulated.insert(p);
  }
}

// A parameter that is replicated over a tensor-parallel dimension may get its gradient as a partial sum over
// it: FSDP reduces that first (FSDPParam._get_grad_inner_tensor), parameter by parameter. Takes these
// parameters out of `grads`.
std::vector<BufferId> Fsdp2Policy::ReducePartialGrads(UnitId id, std::set<std::int32_t>& grads,
                                                      bool accumulated) {
  std::vector<BufferId> reduced;
  const std::set<std::int32_t> all = grads;
  for (const std::int32_t p : all) {
    BufferId grad = -1;
    for (const ParameterPlacement& placement : UnitOf(id).parameters[p].placements) {
      if (!placement.grad_partial) continue;
      const CommunicatorId communicator = partition_.mesh_groups.at(placement.mesh_dim);
      if (communicator < 0) continue;
      if (grad < 0) grad = GradBuffer(id, {p}, accumulated);
      Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, kCompute);
      reduce.src = grad;
      reduce.communicator = communicator;
    }
    if (grad < 0) continue;
    reduced.push_back(grad);
    grads.erase(p);
  }
  return reduced;
}

// The unsharded gradients to reduce, no longer the parameters' own.
std::vector<BufferId> Fsdp2Policy::TakeGrads(UnitId unit) {
  Group& group = groups_[unit];
  std::vector<BufferId> taken;
  const auto take = [&](std::set<std::int32_t> grads, bool accumulated) {
    const std::vector<BufferId> partial = ReducePartialGrads(unit, grads, accumulated);
    for (const std::int32_t p : std::set(grads)) {  // each goes by itself
      if (!IsChunked(unit, p)) continue;
      taken.push_back(GradBuffer(unit, {p}, accumulated));
      grads.erase(p);
    }
    if (!grads.empty()) taken.push_back(GradBuffer(unit, grads, accumulated));
    taken.insert(taken.end(), partial.begin(), partial.end());
  };
  for (const std::int32_t p : group.accumulated) take({p}, true);
  take(group.grads, false);
  group.accumulated.clear();
  group.grads.clear();
  return taken;
}

Status Fsdp2Policy::PostBackward(UnitId unit, std::string_view reason) {
  Group& group = groups_[unit];
  builder_.SetUnit(unit);
  builder_.SetReason(reason);
  group.training = TrainingState::kPostBackward;
  AddToAccumulatedGrad(unit);
  if (!group.reduce_grads) {
    const MixedPrecision& mixed = partition_.units[unit].mixed_precision;
    if (!group.was_unsharded && mixed.reduce_dtype && mixed.reduce_dtype != mixed.param_dtype) {
      return MakeInputError("/program",
                            "PyTorch fails here ('FSDPParam' object has no attribute '_unsharded_param'): it "
                            "looks for gradients that wait in the reduce dtype in a unit that has never run",
                            DisplayName(UnitOf(unit).fqn));
    }
    if (group.reshard_after_backward) Reshard(unit);
    ToAccumulatedGrad(unit);
    return {};
  }
  if (!group.accumulated.empty() && !group.grads.empty()) {
    return MakeInputError(
        "/program",
        "PyTorch fails here (FSDP reduce-scatter expects uniform gradient dtype): parameters that get their "
        "first gradient in this backward have it in another dtype than those that accumulated without sync",
        DisplayName(UnitOf(unit).fqn));
  }
  std::set<std::int32_t> with_grad = group.grads;
  with_grad.insert(group.accumulated.begin(), group.accumulated.end());
  const std::vector<BufferId> grads = TakeGrads(unit);
  if (group.reshard_after_backward) Reshard(unit);
  if (with_grad.empty()) return {};
  WaitReduceScatter(Comm(unit), group.reduce_scatters_in_flight - 1);
  WaitForPostBackward(unit);
  return ForeachReduce(unit, {with_grad.begin(), with_grad.end()}, grads);
}

// Waits for the oldest reduce-scatters in flight until `keep` are left: their inputs may be used again.
void Fsdp2Policy::WaitReduceScatter(CommContext& comm, std::size_t keep) {
  while (comm.reduce_scatters.size() > keep) {
    const PendingReduce oldest = comm.reduce_scatters.front();
    comm.reduce_scatters.erase(comm.reduce_scatters.begin());
    const UnitId caller = builder_.unit();
    builder_.Wait(oldest.event, kCompute);
    builder_.SetUnit(-1);
    builder_.Free(oldest.input, kCompute);
    builder_.SetUnit(caller);
  }
}

void Fsdp2Policy::WaitForPostBackward(UnitId unit) {
  Group& group = groups_[unit];
  if (group.post_reduce_event >= 0) builder_.Wait(group.post_reduce_event, kCompute);
  group.post_reduce_event = -1;
  if (!group.all_reduce) return;
  builder_.Wait(group.all_reduce->event, kCompute);
  if (group.all_reduce->free_input) builder_.Free(group.all_reduce->input, Comm(unit).reduce_scatter);
  group.all_reduce.reset();
}

void Fsdp2Policy::FinalizeBackward(UnitId unit) {
  Group& group = groups_[unit];
  WaitForPostBackward(unit);
  if (group.grad_offload_event >= 0) builder_.HostWait(group.grad_offload_event);
  group.grad_offload_event = -1;
  if (group.pending) {  // gathered for a backward that did not come
    if (group.offloads) {
      AddFault(
          Rule::kWriteRace,
          "the shard of a unit gathered for nothing is still being copied to the device, and nothing makes "
          "the host wait for that before the optimizer writes it there (what is copied is dropped)");
    }
    if (group.pending->event >= 0) {
      builder_.Wait(group.pending->event, kCompute);
      builder_.Free(group.pending->output, Comm(unit).copy_in);
    }
    group.pending.reset();
  }
  group.post_forward_indices.clear();
}

// _get_gradient_divide_factors, and the one-rank branch of foreach_reduce.
Fsdp2Policy::Divide Fsdp2Policy::DivideFactors(UnitId unit) const {
  const Group& group = groups_[unit];
  const DType dtype = UnitOf(unit).reduce_dtype;
  const bool overflow_risk = dtype != DType::kFloat32 && dtype != DType::kBFloat16;
  const bool single = ShardRanks(unit) == 1;
  const auto ranks = static_cast<double>(ShardRanks(unit) * partition_.units[unit].replicate_size);
  Divide divide;
  if (single) divide.copy = group.gradient_divide_factor;
  if (!overflow_risk && !group.force_sum_reduction) {
    if (!group.gradient_divide_factor) {
      divide.reduce_scatter = divide.all_reduce = ranks == 1 ? ReduceOp::kSum : ReduceOp::kAverage;
    } else if (*group.gradient_divide_factor == static_cast<double>(ShardRanks(unit))) {
      divide.reduce_scatter = ReduceOp::kAverage;
    } else if (!single) {
      divide.premultiply = group.gradient_divide_factor;
    }
    return divide;
  }
  const double factor = group.gradient_divide_factor.value_or(ranks);
  if (!overflow_risk) {
    divide.post = factor;
    return divide;
  }
  divide.pre = PredivideFactor(factor);
  divide.post = factor / *divide.pre;
  return divide;
}

BufferId Fsdp2Policy::PartialBuffer(UnitId id, const std::vector<std::int32_t>& parameters) {
  const Unit& unit = UnitOf(id);
  std::int64_t numel = 0;
  for (const std::int32_t p : parameters) numel += PaddedPieceNumel(unit.parameters[p], ShardRanks(id));
  return CommBuffer(id, BufferRole::kPartialReduceOutput, unit.reduce_dtype,
                    Bytes{numel * SizeBytes(unit.reduce_dtype)}, parameters);
}

void Fsdp2Policy::Scale(const std::optional<double>& factor, BufferId buffer, StreamId stream) {
  if (!factor || *factor == 1) return;
  Instruction& instruction = builder_.Emit(InstructionKind::kGradScale, stream);
  instruction.src = buffer;
  instruction.divisor = *factor;
}

// Cut along another dimension than the first: the gradient's pieces do not lie one behind another.
bool Fsdp2Policy::IsChunked(UnitId id, std::int32_t p) const {
  return ShardRanks(id) > 1 && UnitOf(id).parameters[p].shard_dim != 0;
}

// Gradients whose pieces do not lie one behind another are put in that order one by one, and go when
// foreach_reduce's loop names them no more: its chunks are views of the latest one until the next one's turn,
// and Python's zip keeps every second tuple that it gave, beginning with the first, until it is asked for the
// second next. Moves them from `grads` to what is returned.
Fsdp2Policy::OrderedGrads Fsdp2Policy::OrderChunkedGrads(UnitId id,
                                                         const std::vector<std::int32_t>& parameters,
                                                         std::vector<BufferId>& grads) {
  OrderedGrads ordered;
  std::vector<std::pair<std::size_t, BufferId>> named;  // turn and gradient
  for (std::size_t turn = 0; turn < parameters.size(); ++turn) {
    const std::int32_t p = parameters[turn];
    if (!IsChunked(id, p)) continue;
    std::erase_if(named, [&](const auto& earlier) {
      if (earlier.first % 2 == 0 && turn < earlier.first + 2) return false;
      builder_.Free(earlier.second, kCompute);
      return true;
    });
    const auto grad = std::ranges::find_if(
        grads, [&](BufferId b) { return builder_.plan().buffers[b].parameters == std::vector{p}; });
    const Buffer from = builder_.plan().buffers[*grad];
    ordered.copies.push_back(builder_.UnitBuffer(id, BufferRole::kGradUnshardedAccumulated, from.dtype,
                                                 from.parts_bytes, {p}, fmt::format("chunks.p{}", p)));
    builder_.Allocate(ordered.copies.back(), kCompute);
    builder_.Move(InstructionKind::kGradCopyIn, *grad, ordered.copies.back(), kCompute);
    named.emplace_back(turn, *grad);
    grads.erase(grad);
  }
  if (named.empty()) return ordered;
  ordered.last_grad = named.back().second;
  named.pop_back();
  for (const auto& [turn, grad] : named) builder_.Free(grad, kCompute);
  return ordered;
}

// Gradients that are copied into the reduce-scatter input are dropped, but on several ranks a variable of
// foreach_reduce's loop names the last one until it returns. Returns the buffers with what is left.
std::vector<BufferId> Fsdp2Policy::DropCopiedGrads(UnitId id, const std::vector<std::int32_t>& parameters,
                                                   const std::vector<BufferId>& grads) {
  std::set<std::int32_t> named;
  if (ShardRanks(id) > 1) named.insert(parameters.back());
  std::vector<BufferId> left;
  for (const BufferId grad : grads) {
    const std::vector<std::int32_t>& held = builder_.plan().buffers[grad].parameters;
    std::vector<std::int32_t> dropped;
    for (std::size_t part = 0; part < held.size(); ++part) {
      if (!named.contains(held[part])) dropped.push_back(static_cast<std::int32_t>(part));
    }
    if (dropped.size() == held.size()) {
      builder_.Free(grad, kCompute);
      continue;
    }
    if (!dropped.empty()) builder_.FreeParts(grad, kCompute, std::move(dropped));
    left.push_back(grad);
  }
  return left;
}

// The gradients, cut and padded, one rank's piece after another. Of `grads` those are left that still hold
// one.
BufferId Fsdp2Policy::CopyInGrads(UnitId id, const std::vector<std::int32_t>& parameters,
                                  std::vector<BufferId>& grads, std::string_view suffix) {
  const Unit& unit = UnitOf(id);
  const std::int64_t ranks = ShardRanks(id);
  std::int64_t numel = 0;
  for (const std::int32_t p : parameters) numel += PaddedPieceNumel(unit.parameters[p], ranks);
  const OrderedGrads ordered = OrderChunkedGrads(id, parameters, grads);
  const BufferId input = CommBuffer(id, BufferRole::kReduceScatterInput, unit.reduce_dtype,
                                    Bytes{numel * ranks * SizeBytes(unit.reduce_dtype)}, parameters, suffix);
  builder_.Allocate(input, kCompute);
  for (const std::vector<BufferId>& sources : {grads, ordered.copies}) {
    for (const BufferId source : sources) {
      builder_.Move(InstructionKind::kGradCopyIn, source, input, kCompute);
    }
  }
  grads = DropCopiedGrads(id, parameters, grads);
  for (const BufferId copy : ordered.copies) builder_.Free(copy, kCompute);
  if (ordered.last_grad >= 0) grads.push_back(ordered.last_grad);
  return input;
}

void Fsdp2Policy::ReduceScatter(UnitId id, BufferId input, BufferId output) {
  const Unit& unit = UnitOf(id);
  const Divide divide = DivideFactors(id);
  const StreamId stream = Comm(id).reduce_scatter;
  Scale(divide.pre, input, stream);
  if (ShardRanks(id) > 1) {
    Instruction& reduce = builder_.Move(InstructionKind::kReduceScatter, input, output, stream);
    reduce.communicator =
        groups_[id].separate_reduce_scatter ? unit.reduce_scatter_communicator : unit.shard_communicator;
    reduce.reduce_op = divide.reduce_scatter;
    reduce.divisor = divide.premultiply.value_or(1.0);
  } else {
    builder_.Move(InstructionKind::kGradCopyIn, input, output, stream);
    Scale(divide.copy, output, stream);
    if (divide.copy && (divide.pre || divide.post)) {
      AddFault(Rule::kGradDivision,
               "on one shard rank foreach_reduce divides by the gradient divide factor while it copies, and "
               "again where reductions are sums");
    }
  }
}

// HSDP accumulation: reduced over the shards, not yet over the replicas.
void Fsdp2Policy::KeepPartial(UnitId id, BufferId output, bool is_new) {
  Group& group = groups_[id];
  const StreamId stream = Comm(id).reduce_scatter;
  if (is_new) {
    group.partial_reduce_output = output;
  } else {
    builder_.Move(InstructionKind::kGradAccumulate, output, group.partial_reduce_output, stream);
    builder_.Free(output, stream);
  }
  builder_.Record(group.post_reduce_event, stream);
}

// What waits for the all-reduce is one buffer: it has to be of the same parameters every time.
Status Fsdp2Policy::CheckPartial(UnitId id, const std::vector<std::int32_t>& parameters) const {
  const BufferId partial = groups_[id].partial_reduce_output;
  if (partial < 0 || builder_.plan().buffers[partial].parameters == parameters) return {};
  return MakeInputError(
      "/program",
      "PyTorch adds the gradients that wait for the all-reduce to those of other parameters here: it fails, "
      "or where both have one number of elements, or what is added has a single one, gives wrong gradients",
      DisplayName(UnitOf(id).fqn));
}

StreamId Fsdp2Policy::AllReduce(UnitId id, BufferId output) {
  Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const StreamId reduce_scatter = Comm(id).reduce_scatter;
  if (unit.replicate_communicator < 0) return reduce_scatter;
  if (group.partial_reduce_output >= 0) {
    builder_.Move(InstructionKind::kGradAccumulate, group.partial_reduce_output, output, reduce_scatter);
  }
  const StreamId stream = AllReduceStream(id);
  builder_.WaitStream(stream, reduce_scatter, EventName(id, "all_reduce_input"));
  Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, stream);
  reduce.src = output;
  reduce.communicator = unit.replicate_communicator;
  reduce.reduce_op = DivideFactors(id).all_reduce;
  const EventId event = builder_.Event(EventName(id, "all_reduce"));
  builder_.Record(event, stream);
  group.all_reduce = AllReduceState{output, event, true};
  return stream;
}

// set_all_reduce_hook: after the reduce-scatter, with HSDP after its all-reduce. What follows stays on the
// hook's stream.
StreamId Fsdp2Policy::RunHook(UnitId id, BufferId output, StreamId stream) {
  const std::optional<AllReduceHook>& hook = partition_.units[id].all_reduce_hook;
  if (!hook) return stream;
  const std::string reason = builder_.reason();
  stream = hook->own_stream ? builder_.Stream("all_reduce_hook") : AllReduceStream(id);
  builder_.WaitStream(stream, Comm(id).reduce_scatter, EventName(id, "all_reduce_hook"));
  builder_.SetReason("all_reduce_hook");
  if (UnitOf(id).hook_communicator >= 0) {
    Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, stream);
    reduce.src = output;
    reduce.communicator = UnitOf(id).hook_communicator;
    reduce.reduce_op = hook->reduce_op;
  }
  Scale(hook->divide, output, stream);
  builder_.SetReason(reason);
  return stream;
}

Status Fsdp2Policy::ForeachReduce(UnitId id, const std::vector<std::int32_t>& parameters,
                                  std::vector<BufferId> grads) {
  if (Status s = CheckPartial(id, parameters); !s) return s;
  const CommContext& comm = Comm(id);
  // With several in flight a unit that reduces again may meet its own last input.
  const auto same = std::ranges::count(comm.reduce_scatters, id, &PendingReduce::unit);
  const std::string again = same == 0 ? "" : fmt::format("again_{}", same + 1);
  const BufferId input = CopyInGrads(id, parameters, grads, again);
  ReduceInput(id, parameters, input, again);
  for (const BufferId grad : grads) builder_.Free(grad, kCompute);
  return {};
}

void Fsdp2Policy::ReduceInput(UnitId id, const std::vector<std::int32_t>& parameters, BufferId input,
                              std::string_view again) {
  Group& group = groups_[id];
  CommContext& comm = Comm(id);
  const Unit& unit = UnitOf(id);
  const Bytes bytes{SizeBytes(builder_.plan().buffers[input]).value / ShardRanks(id)};
  builder_.WaitStream(comm.reduce_scatter, kCompute, EventName(id, "grads_ready"));
  const bool partial_only = unit.replicate_communicator >= 0 && !group.all_reduce_grads;
  const bool new_partial = partial_only && group.partial_reduce_output < 0;
  const BufferId output =
      new_partial ? PartialBuffer(id, parameters)
                  : CommBuffer(id, BufferRole::kReduceScatterOutput, unit.reduce_dtype, bytes, parameters);
  builder_.Allocate(output, comm.reduce_scatter);
  ReduceScatter(id, input, output);
  const EventId event = builder_.Event(
      EventName(id, again.empty() ? "reduce_scatter" : fmt::format("reduce_scatter.{}", again)));
  builder_.Record(event, comm.reduce_scatter);
  comm.reduce_scatters.push_back({id, input, event});
  group.post_reduce_event = builder_.Event(EventName(id, "post_reduce"));
  if (partial_only) {
    KeepPartial(id, output, new_partial);
    return;
  }
  const StreamId stream = RunHook(id, output, AllReduce(id, output));
  Scale(DivideFactors(id).post, output, stream);
  DeliverGrad(id, output, stream, parameters);
  builder_.Record(group.post_reduce_event, stream);
  if (group.partial_reduce_output >= 0) {
    builder_.Free(group.partial_reduce_output, comm.reduce_scatter);
    group.partial_reduce_output = -1;
  }
}

}  // namespace shardplan
