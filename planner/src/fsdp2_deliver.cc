// The reduced gradient becomes, or is added to, the sharded parameters' .grad (the end of foreach_reduce).
#include "fsdp2_policy.h"
#include "layout.h"

namespace shardplan {

std::vector<Bytes> Fsdp2Policy::ShardedGradParts(UnitId id,
                                                 const std::vector<std::int32_t>& parameters) const {
  const Unit& unit = UnitOf(id);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{PaddedShardNumel(unit.parameters[p], ShardRanks(id)) * SizeBytes(unit.orig_dtype)});
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

void Fsdp2Policy::DeliverGrad(UnitId id, BufferId output, StreamId stream,
                              const std::vector<std::int32_t>& parameters) {
  Group& group = groups_[id];
  if (group.offloads) return DeliverGradToHost(id, output, stream, parameters);
  const Unit& unit = UnitOf(id);
  const bool casts = unit.reduce_dtype != unit.orig_dtype;
  const std::vector<Bytes> parts = ShardedGradParts(id, parameters);
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
  const bool is_gradient = !casts && !group.has_sharded_grad;
  group.has_sharded_grad = true;
  DropReduced(id, output, stream, is_gradient);
  if (strategy_.optimizer.in_backward) StepInBackward(id, stream);
}

// Hooks after the accumulation of a sharded gradient: they step the parameter and drop its gradient, on the
// stream that has just delivered it.
void Fsdp2Policy::StepInBackward(UnitId id, StreamId stream) {
  const std::string reason = builder_.reason();
  const bool offloads = groups_[id].offloads;
  optimizer_.StepParameters(id, offloads ? -1 : stream);
  builder_.SetUnit(id);
  builder_.SetReason(reason);
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  groups_[id].has_sharded_grad = false;
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
  const Unit& unit = UnitOf(id);
  const std::vector<Bytes> parts = ShardedGradParts(id, parameters);
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
  DropReduced(id, output, stream, false);
  if (strategy_.optimizer.in_backward) StepInBackward(id, stream);
}

}  // namespace shardplan
