// SPDX-License-Identifier: Apache-2.0
// One instruction of a plan: what it needs to be true, and whom it is handed to.
#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "replay/first_line.h"
#include "replay/replayer_impl.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {

Status Replayer::Impl::RequireAlive(BufferId buffer) const {
  if (alive_[buffer] == 1) [[likely]] {
    return {};
  }
  return NotAlive(buffer);
}

Status Replayer::Impl::NotAlive(BufferId buffer) const {
  return MakeError(ErrorCode::kBadInput,
                   fmt::format("{} is used while it is not allocated", plan_.buffers[buffer].name));
}

// A copy may use what is left of a buffer of which parts were freed.
Status Replayer::Impl::RequireReadable(const Op& op) const {
  if (alive_[op.src] != kInPart || op.code != OpCode::kCopy) return RequireAlive(op.src);
  const std::vector<std::int32_t>& freed = freed_parts_[op.src];
  const bool touched = std::ranges::any_of(program_.copies[op.a].runs, [&](const CopyRun& run) {
    return std::ranges::find(freed, run.src_part) != freed.end();
  });
  return touched ? NotAlive(op.src) : Status();
}

// LibTorch, and models written against it, throw (out of memory, say). This is where that ends.
Status Replayer::Impl::RunCaught(const Op& op, bool& blocked) {
  try {
    return Run(op, blocked);
  } catch (const std::exception& exception) {
    thrown_ = std::current_exception();
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
}

Status Replayer::Impl::Run(const Op& op, bool& blocked) {
  switch (op.code) {
    case OpCode::kNothing:
      return {};
    case OpCode::kAllocate:
    case OpCode::kFree:
    case OpCode::kDropGradients:
    case OpCode::kDropActivations:
      return RunMemory(op);
    case OpCode::kCopy:
    case OpCode::kGradCast:
    case OpCode::kAccumulate:
    case OpCode::kCollective:
    case OpCode::kScale:
      return RunMove(op);
    case OpCode::kRecord:
    case OpCode::kWait:
    case OpCode::kHostWait:
      return RunOrder(op, blocked);
    default:
      return RunModel(op);
  }
}

Status Replayer::Impl::RunMemory(const Op& op) {
  const BufferId buffer = op.a;
  if (op.code == OpCode::kAllocate) {
    if (alive_[buffer]) {
      return MakeError(ErrorCode::kBadInput,
                       fmt::format("{} is allocated while it is alive", plan_.buffers[buffer].name));
    }
    alive_[buffer] = 1;
    filled_[buffer] = 0;
    storages_left_[buffer] = static_cast<std::int32_t>(plan_.buffers[buffer].storages.size());
    NoteBuffer(buffer);
    return device_.Allocate(buffer, op.stream);
  }
  if (!alive_[buffer]) return NotAlive(buffer);
  const FreeSpec& free = program_.frees[op.b];
  const UnitId unit = plan_.buffers[buffer].unit;
  if (unit >= 0 && bound_[unit] == buffer) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is freed while the parameters of {} are views of it",
                                 plan_.buffers[buffer].name, plan_.units[unit].fqn));
  }
  alive_[buffer] = free.parts.empty() ? 0 : kInPart;
  if (free.parts.empty()) {
    freed_parts_[buffer].clear();
  } else {
    freed_parts_[buffer].insert(freed_parts_[buffer].end(), free.parts.begin(), free.parts.end());
  }
  filled_[buffer] = 0;
  NoteBuffer(buffer);
  std::ranges::fill(grads_made_[buffer], 0);
  if (Status status = free.parts.empty() ? device_.Free(buffer, free.safe_after)
                                         : device_.FreeParts(buffer, free.parts, free.safe_after);
      !status) {
    return status;
  }
  if (op.code == OpCode::kDropActivations) return model_->DropActivations(unit, buffer, Microbatch());
  return op.code == OpCode::kFree ? Status() : model_->DropGradients(unit, buffer, free.parts);
}

Status Replayer::Impl::RunMove(const Op& op) {
  if (Status status = RequireReadable(op); !status) return status;
  if (op.reads_shard && model_ != nullptr) {
    const UnitId unit = plan_.buffers[op.src].unit;
    if (Status status = model_->ShardedParametersRead(unit, op.stream); !status) return status;
  }
  if (op.takes_gradients) {
    if (Status status = model_->TakeGradients(plan_.buffers[op.src].unit, op.src); !status) return status;
  }
  if (op.takes_activations) {
    if (Status status = model_->TakeActivations(plan_.buffers[op.src].unit, op.src, Microbatch()); !status)
      return status;
  }
  Status status;
  const bool alias =
      op.code == OpCode::kGradCast && MakesView(plan_, CurrentInstruction(), alive_[op.dst] != 0);
  if (alias) {
    alive_[op.dst] = 1;
    alias_of_[op.dst] = op.src;
    alias_by_owner_[op.src] = op.dst;
    status = device_.MakeAlias(op.a);
  } else if (op.code == OpCode::kScale) {
    return device_.Scale(op.a, program_.divisors[op.b], op.stream);
  } else {
    if (Status alive = RequireAlive(op.dst); !alive) return alive;
    Result<bool> moved = op.extended && model_ != nullptr ? model_->MoveExtended(op.src, op.dst, op.stream)
                                                          : Result<bool>(false);
    if (!moved) return std::unexpected(std::move(moved.error()));
    if (*moved) {
      status = {};
    } else if (op.code == OpCode::kCollective) {
      status = IssueCollective(op);
    } else if (op.code == OpCode::kAccumulate && filled_[op.dst]) {
      status = device_.Accumulate(op.a, op.stream);
    } else {
      status = device_.Copy(op.a, op.stream);
    }
  }
  if (!status) return status;
  filled_[op.dst] = 1;
  if (op.gives_activations) {
    if (Status given = model_->GiveActivations(plan_.buffers[op.dst].unit, op.dst, Microbatch()); !given)
      return given;
    return device_.Free(op.dst, {});  // the model has them
  }
  if (op.last_reduction && model_ != nullptr) {
    return model_->GradientsReduced(plan_.buffers[op.dst].unit, op.dst, op.stream);
  }
  if (op.final_gradient && model_ != nullptr) {
    return model_->ShardedGradientsReady(plan_.buffers[op.dst].unit, op.dst);
  }
  return {};
}

Status Replayer::Impl::IssueCollective(const Op& op) {
  if (op.begins_group) {
    if (Status status = collectives_.BeginGroup(); !status) return status;
  }
  Status status = collectives_.Issue(op.a, op.stream);
  return status && op.ends_group ? collectives_.EndGroup() : status;
}

Status Replayer::Impl::RunModel(const Op& op) {
  switch (op.code) {
    case OpCode::kCompute:
      return Compute(op);
    case OpCode::kBindUnsharded:
    case OpCode::kBindSharded:
      if (Status status = RequireAlive(op.b); !status) return status;
      bound_[op.a] = op.code == OpCode::kBindUnsharded ? op.b : -1;
      if (model_ == nullptr) return {};
      return op.code == OpCode::kBindUnsharded ? model_->BindUnsharded(op.a, op.b)
                                               : model_->BindSharded(op.a, op.b);
    case OpCode::kOptimizerStep:
      return model_ == nullptr ? Status() : model_->OptimizerStep(op.a, op.b, op.stream);
    case OpCode::kUpdate:
      if (Status status = RequireAlive(op.a); !status) return status;
      return model_ == nullptr ? Status() : model_->Update(CurrentInstruction());
    case OpCode::kZeroGrad:
      return ZeroGrad(op.a);
    default:
      return MakeError(ErrorCode::kInternal, "unknown operation");
  }
}

Status Replayer::Impl::RunOrder(const Op& op, bool& blocked) {
  if (op.code == OpCode::kRecord) return device_.Record(op.a, op.stream);
  if (op.code == OpCode::kWait) return device_.Wait(op.a, op.stream);
  Result<bool> reached = device_.HostWait(op.a);
  if (!reached) return std::unexpected(std::move(reached.error()));
  blocked = !*reached;
  return collectives_.Check();
}

Status Replayer::Impl::MakeGradient(GradTarget& target, StreamId stream) {
  if (!alive_[target.buffer]) {
    alive_[target.buffer] = 1;
    if (!model_makes_gradients_) {
      if (Status status = device_.Allocate(target.buffer, stream); !status) return status;
    }
  }
  filled_[target.buffer] = 1;
  std::uint8_t& made = grads_made_[target.buffer][target.parameter];
  target.adds = made != 0;
  made = 1;
  return {};
}

// Activations that a segment makes are there before it runs.
Status Replayer::Impl::MakeActivations(const ActivationUse& use, StreamId stream) {
  if (use.made == 0) return RequireAlive(use.buffer);
  storages_left_[use.buffer] += use.made;
  if (alive_[use.buffer]) return {};
  alive_[use.buffer] = filled_[use.buffer] = 1;
  return model_holds_activations_ ? Status() : device_.Allocate(use.buffer, stream);
}

// The last storage that goes ends the buffer.
Status Replayer::Impl::EndActivations(const ActivationUse& use) {
  storages_left_[use.buffer] -= use.freed;
  if (storages_left_[use.buffer] > 0 || !alive_[use.buffer]) return {};
  alive_[use.buffer] = filled_[use.buffer] = 0;
  return model_holds_activations_ ? Status() : device_.Free(use.buffer, {});
}

Status Replayer::Impl::Compute(const Op& op) {
  targets_ = program_.grad_targets[op.src];
  for (GradTarget& target : targets_) {
    if (Status status = MakeGradient(target, op.stream); !status) return status;
  }
  const std::vector<ActivationUse>& activations = program_.activations[op.a];
  for (const ActivationUse& use : activations) {
    if (Status status = MakeActivations(use, op.stream); !status) return status;
  }
  Status computed;
  if (model_ != nullptr) {
    ComputeCall call = {op.a, op.b, op.stream, steps_completed_, {}, activations};
    if (!model_makes_gradients_) call.grads = targets_;
    computed = model_->Compute(call);
  }
  for (const ActivationUse& use : activations) {
    if (computed) computed = EndActivations(use);
  }
  if (recording_ != nullptr) [[unlikely]] {
    NoteGradients();
  }
  return computed;
}

Status Replayer::Impl::ZeroGrad(UnitId unit) {
  if (model_ != nullptr) {
    if (Status status = model_->ZeroGrad(unit); !status) return status;
  }
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (!alive_[b] || !ZeroGradTakes(unit, buffer)) continue;
    filled_[b] = 0;
    if (buffer.persistent) continue;
    alive_[b] = 0;
    NoteBuffer(static_cast<BufferId>(b));
    if (Status status = device_.Free(static_cast<BufferId>(b), {}); !status) return status;
  }
  return {};
}

}  // namespace shardplan::executor
