// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/sharded_grads.h"

#include <algorithm>
#include <string>

#include "shardplan/schemas/precision.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {

std::vector<Bytes> ShardedGrads::Parts(const Run& run, const std::vector<std::int32_t>& parameters) const {
  const Unit& unit = scope_.unit();
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{PaddedPieceNumel(unit.parameters[p], scope_.shard_ranks()) * SizeBytes(run.dtype)});
  }
  return parts;
}

// FSDP lays the parameters of a dtype out one behind the other (_reduce_scatter_param_indices); here they
// keep the unit's order, and a run is what of the buffer they have. Sizes are the same.
std::vector<ShardedGrads::Run> ShardedGrads::RunsOf(BufferId reduced,
                                                    const std::vector<std::int32_t>& parameters) const {
  const Unit& unit = scope_.unit();
  const DType reduce_dtype = scope_.program().plan().buffers[reduced].dtype;
  std::vector<Run> runs;
  std::int64_t cast_numel = 0, uncast_numel = 0;
  for (const std::int32_t p : parameters) {
    const DType dtype = ShardedGradDType(unit.parameters[p]);
    auto run = std::ranges::find(runs, dtype, &Run::dtype);
    if (run == runs.end()) run = runs.insert(runs.end(), {.dtype = dtype});
    run->parameters.push_back(p);
    (dtype == reduce_dtype ? uncast_numel : cast_numel) +=
        PaddedPieceNumel(unit.parameters[p], scope_.shard_ranks());
  }
  for (Run& run : runs) run.copies = run.dtype != reduce_dtype || cast_numel > uncast_numel;
  return runs;
}

ShardedGrads::Destinations ShardedGrads::DestinationsOf(const std::vector<std::int32_t>& parameters) const {
  Destinations to;
  for (const std::int32_t p : parameters) {
    const auto found = state_.grads.find(p);
    if (found == state_.grads.end()) {
      to.fresh.push_back(p);
    } else {
      to.added[found->second].push_back(p);
    }
  }
  return to;
}

void ShardedGrads::SetGrads(const std::vector<std::int32_t>& parameters, BufferId grad) {
  for (const std::int32_t p : parameters) state_.grads[p] = grad;
}

// The reduced gradients in the run's dtype: `reduced` itself, or a new buffer that the caller frees.
BufferId ShardedGrads::Cast(BufferId reduced, StreamId stream, const Run& run) const {
  if (!run.copies) return reduced;
  const BufferId cast = scope_.Buffer(BufferRole::kReduceScatterOutput, run.dtype, Parts(run, run.parameters),
                                      run.parameters, "cast");
  scope_.program().Allocate(cast, stream);
  scope_.program().Move(InstructionKind::kGradCast, reduced, cast, stream);
  return cast;
}

bool ShardedGrads::Deliver(BufferId reduced, StreamId stream, const std::vector<std::int32_t>& parameters) {
  bool is_gradient = false;
  for (const Run& run : RunsOf(reduced, parameters)) {
    if (scope_.offloads()) {
      DeliverToHost(reduced, stream, run);
    } else if (DeliverRun(reduced, stream, run)) {
      is_gradient = true;
    }
  }
  return is_gradient;
}

bool ShardedGrads::DeliverRun(BufferId reduced, StreamId stream, const Run& run) {
  ProgramBuilder& program = scope_.program();
  const Destinations to = DestinationsOf(run.parameters);
  const auto gradient = [&] {
    return scope_.Buffer(BufferRole::kGradSharded, run.dtype, Parts(run, to.fresh), to.fresh);
  };
  if (to.added.empty()) {
    const BufferId grad = gradient();
    if (run.copies) program.Allocate(grad, stream);
    program.Move(InstructionKind::kGradCast, reduced, grad, stream);
    SetGrads(to.fresh, grad);
    return !run.copies;
  }
  const BufferId cast = Cast(reduced, stream, run);
  for (const auto& [grad, added] : to.added) {
    program.Move(InstructionKind::kGradAccumulate, cast, grad, stream);
  }
  if (!to.fresh.empty()) {
    const BufferId grad = gradient();
    program.Move(InstructionKind::kGradCast, cast, grad, stream);
    SetGrads(to.fresh, grad);
  }
  if (run.copies) program.Free(cast, stream);
  return !run.copies && !to.fresh.empty();
}

// The copy overlaps only into pinned memory, and not when the host adds it to an earlier gradient.
BufferId ShardedGrads::CopyToHost(BufferId from, StreamId stream, const Run& run,
                                  const std::vector<std::int32_t>& parameters, std::string_view suffix,
                                  MemoryKind memory) {
  ProgramBuilder& program = scope_.program();
  const BufferId host =
      scope_.Buffer(BufferRole::kGradHost, run.dtype, Parts(run, parameters), parameters, suffix, memory);
  program.Allocate(host, kHost);
  program.Move(InstructionKind::kCopyToHost, from, host, stream);
  const EventId event = scope_.Event(suffix.empty() ? "grad_offload" : "grad_arrived");
  program.Record(event, stream);
  if (memory == MemoryKind::kPinnedHost) {
    state_.grad_offload_event = event;
  } else {
    program.HostWait(event);
  }
  return host;
}

void ShardedGrads::DeliverToHost(BufferId reduced, StreamId stream, const Run& run) {
  ProgramBuilder& program = scope_.program();
  const Destinations to = DestinationsOf(run.parameters);
  const BufferId cast = Cast(reduced, stream, run);
  for (const auto& [grad, added] : to.added) {
    const BufferId arrived = CopyToHost(cast, stream, run, added, "new", MemoryKind::kHost);
    program.Move(InstructionKind::kGradAccumulate, arrived, grad, kHost);
    program.Free(arrived, kHost);
  }
  if (!to.fresh.empty()) {
    SetGrads(to.fresh, CopyToHost(cast, stream, run, to.fresh, {}, scope_.shard_memory()));
  }
  if (cast != reduced) program.Free(cast, stream);
}

void ShardedGrads::StepInBackward(OptimizerMemory& optimizer, StreamId stream,
                                  const std::vector<std::int32_t>& parameters) {
  ProgramBuilder& program = scope_.program();
  const std::string reason = program.reason();
  optimizer.StepParameters(scope_.id(), scope_.offloads() ? kHost : stream, parameters);
  program.SetUnit(scope_.id());
  program.SetReason(reason);
  program.Emit(InstructionKind::kZeroGrad, kHost);
  Clear();
}

void ShardedGrads::Discard() {
  if (state_.grads.empty()) return;
  scope_.program().Emit(InstructionKind::kZeroGrad, kHost);
  Clear();
}

void ShardedGrads::WaitForOffload() {
  if (state_.grad_offload_event >= 0) scope_.program().HostWait(state_.grad_offload_event);
  state_.grad_offload_event = -1;
}

}  // namespace shardplan::fsdp2
