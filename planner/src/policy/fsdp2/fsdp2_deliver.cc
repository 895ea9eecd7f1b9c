// The reduced gradient becomes, or is added to, the sharded parameters' .grad (the end of foreach_reduce).
#include "policy/fsdp2/fsdp2_policy.h"
#include "units/layout.h"

namespace shardplan {

std::vector<Bytes> Fsdp2Policy::ShardedGradParts(UnitId id,
                                                 const std::vector<std::int32_t>& parameters) const {
  const Unit& unit = UnitOf(id);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{PaddedPieceNumel(unit.parameters[p], ShardRanks(id)) * SizeBytes(unit.orig_dtype)});
  }
  return parts;
}

// With HSDP the all-reduce's input is kept until the unit's next wait_for_post_backward. A hook's is not:
// where no gradient is a view of it, it goes while the hook's stream may still be using it.
void Fsdp2Policy::DropReduced(UnitId unit, BufferId output, StreamId stream, bool is_gradient) {
  if (groups_[unit].all_reduce) return;
  builder_.Free(output, Comm(unit).reduce_scatter);
  if (is_gradient || stream == Comm(unit).reduce_scatter) return;
  AddFault(
      Rule::kFreeBeforeLastUse,
      "foreach_reduce drops a reduce-scatter's output that an all-reduce hook's stream still reads, to cast "
      "it or to add it to an earlier gradient: the next reduce-scatter may get its memory");
}

Fsdp2Policy::Destinations Fsdp2Policy::DestinationsOf(UnitId id,
                                                      const std::vector<std::int32_t>& parameters) const {
  Destinations to;
  for (const std::int32_t p : parameters) {
    const auto found = groups_[id].sharded_grads.find(p);
    if (found == groups_[id].sharded_grads.end()) {
      to.fresh.push_back(p);
    } else {
      to.added[found->second].push_back(p);
    }
  }
  return to;
}

// What was reduced, in the parameters' dtype: `output` itself, or a new buffer that the caller frees.
BufferId Fsdp2Policy::CastReduced(UnitId id, BufferId output, StreamId stream,
                                  const std::vector<std::int32_t>& parameters) {
  const Unit& unit = UnitOf(id);
  if (unit.reduce_dtype == unit.orig_dtype) return output;
  const BufferId cast = builder_.UnitBuffer(id, BufferRole::kReduceScatterOutput, unit.orig_dtype,
                                            ShardedGradParts(id, parameters), parameters, "cast");
  builder_.Allocate(cast, stream);
  builder_.Move(InstructionKind::kGradCast, output, cast, stream);
  return cast;
}

// Parameter by parameter the gradient is added to .grad, or becomes it: a view of what was reduced, all of
// whose memory then stays.
void Fsdp2Policy::DeliverGrad(UnitId id, BufferId output, StreamId stream,
                              const std::vector<std::int32_t>& parameters) {
  Group& group = groups_[id];
  if (group.offloads) return DeliverGradToHost(id, output, stream, parameters);
  const Unit& unit = UnitOf(id);
  const bool casts = unit.reduce_dtype != unit.orig_dtype;
  const Destinations to = DestinationsOf(id, parameters);
  const auto gradient = [&] {
    return builder_.UnitBuffer(id, BufferRole::kGradSharded, unit.orig_dtype, ShardedGradParts(id, to.fresh),
                               to.fresh);
  };
  if (to.added.empty()) {
    const BufferId grad = gradient();
    if (casts) builder_.Allocate(grad, stream);
    builder_.Move(InstructionKind::kGradCast, output, grad, stream);
    for (const std::int32_t p : to.fresh) group.sharded_grads[p] = grad;
  } else {
    const BufferId reduced = CastReduced(id, output, stream, parameters);
    for (const auto& [grad, added] : to.added) {
      builder_.Move(InstructionKind::kGradAccumulate, reduced, grad, stream);
    }
    if (!to.fresh.empty()) {
      const BufferId grad = gradient();
      builder_.Move(InstructionKind::kGradCast, reduced, grad, stream);
      for (const std::int32_t p : to.fresh) group.sharded_grads[p] = grad;
    }
    if (casts) builder_.Free(reduced, stream);
  }
  DropReduced(id, output, stream, !casts && !to.fresh.empty());
  if (strategy_.optimizer.in_backward) StepInBackward(id, stream, parameters);
}

// Hooks after the accumulation of a sharded gradient: they step the parameter and drop its gradient, on the
// stream that has just delivered it.
void Fsdp2Policy::StepInBackward(UnitId id, StreamId stream, const std::vector<std::int32_t>& parameters) {
  const std::string reason = builder_.reason();
  const bool offloads = groups_[id].offloads;
  optimizer_.StepParameters(id, offloads ? -1 : stream, parameters);
  builder_.SetUnit(id);
  builder_.SetReason(reason);
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  groups_[id].sharded_grads.clear();
  if (!offloads) return;
  const std::string why =
      "the hook steps a parameter on the host while its gradient is still on the way there: foreach_reduce "
      "waits for pinned copies at the end of the backward only";
  AddFault(Rule::kReadBeforeWrite, why);
  AddFault(Rule::kWriteRace, why);
}

void Fsdp2Policy::DeliverGradToHost(UnitId id, BufferId output, StreamId stream,
                                    const std::vector<std::int32_t>& parameters) {
  Group& group = groups_[id];
  const Destinations to = DestinationsOf(id, parameters);
  const BufferId reduced = CastReduced(id, output, stream, parameters);
  const auto copy = [&](const std::vector<std::int32_t>& copied, std::string_view suffix, MemoryKind memory) {
    const BufferId host = builder_.UnitBuffer(id, BufferRole::kGradHost, UnitOf(id).orig_dtype,
                                              ShardedGradParts(id, copied), copied, suffix, memory);
    builder_.Allocate(host, -1);
    builder_.Move(InstructionKind::kCopyToHost, reduced, host, stream);
    const EventId event = builder_.Event(EventName(id, suffix.empty() ? "grad_offload" : "grad_arrived"));
    builder_.Record(event, stream);
    // The copy overlaps only into pinned memory, and not when the host adds it to an earlier gradient.
    if (memory == MemoryKind::kPinnedHost) {
      group.grad_offload_event = event;
    } else {
      builder_.HostWait(event);
    }
    return host;
  };
  for (const auto& [grad, added] : to.added) {
    const BufferId arrived = copy(added, "new", MemoryKind::kHost);
    builder_.Move(InstructionKind::kGradAccumulate, arrived, grad, -1);
    builder_.Free(arrived, -1);
  }
  if (!to.fresh.empty()) {
    const BufferId grad = copy(to.fresh, {}, ShardMemory(id));
    for (const std::int32_t p : to.fresh) group.sharded_grads[p] = grad;
  }
  if (reduced != output) builder_.Free(reduced, stream);
  DropReduced(id, output, stream, false);
  if (strategy_.optimizer.in_backward) StepInBackward(id, stream, parameters);
}

}  // namespace shardplan
