// SPDX-License-Identifier: Apache-2.0
// Work beside the plan's steps: procedures, and leaving a step.
#include <fmt/format.h>

#include <algorithm>

#include "replay/replayer_impl.h"
#include "shardplan/schemas/buffer_roles.h"

namespace shardplan::executor {

Status Replayer::Impl::RunProcedure(std::int32_t procedure) {
  const ProgramProcedure& entry = program_.procedures[procedure];
  for (const BufferId buffer : entry.supplied) alive_[buffer] = filled_[buffer] = 1;
  for (; op_ < entry.count; ++op_) {
    const Op& op = program_.ops[entry.first + op_];
    if (observer_ != nullptr) observer_->BeforeInstruction(CurrentInstruction());
    for (bool blocked = true; blocked;) {
      blocked = false;
      if (Status status = RunCaught(op, blocked); !status) {
        return Fail(std::move(status.error()), op.code != OpCode::kAllocate);
      }
    }
    ++instructions_issued_;
    if (observer_ != nullptr) observer_->AfterInstruction(CurrentInstruction());
  }
  return {};
}

Status Replayer::Impl::Call(ProcedureKind kind, UnitId unit) {
  if (failure_) return std::unexpected(*failure_);
  if (in_trigger_) return MakeError(ErrorCode::kUsage, "a procedure is called inside a trigger: " + Where());
  const Procedure* found = FindProcedure(plan_, kind, unit);
  if (found == nullptr) {
    return MakeError(ErrorCode::kUsage, fmt::format("the plan does not say how to {} {} on demand: it has no "
                                                    "such procedure; plan the model again",
                                                    Name(kind), DisplayName(plan_.units[unit].fqn)));
  }
  procedure_ = static_cast<std::int32_t>(found - plan_.procedures.data());
  op_ = 0;
  const Status status = RunProcedure(procedure_);
  procedure_ = -1;
  op_ = 0;
  return status;
}

Status Replayer::Impl::Provide(BufferId buffer) {
  if (alive_[buffer]) return MakeError(ErrorCode::kUsage, plan_.buffers[buffer].name + " is there already");
  alive_[buffer] = filled_[buffer] = 1;
  NoteBuffer(buffer);
  return device_.Allocate(buffer, 0);
}

Status Replayer::Impl::Release(BufferId buffer) {
  alive_[buffer] = filled_[buffer] = 0;
  NoteBuffer(buffer);
  freed_parts_[buffer].clear();
  storages_left_[buffer] = 0;
  std::ranges::fill(grads_made_[buffer], 0);
  const bool models = model_makes_gradients_ && plan_.buffers[buffer].role == BufferRole::kGradUnsharded;
  return models ? Status() : device_.Free(buffer, {});
}

// Neither parameters that somebody computes with nor gradients.
bool Replayer::Impl::IsOnItsWay(BufferId id) const {
  const Buffer& buffer = plan_.buffers[id];
  switch (LifetimeOf(buffer.role)) {
    case RoleLifetime::kUnsharded:
      return IsOfExtension(buffer.role) ? bound_[buffer.unit] < 0 : bound_[buffer.unit] != id;
    case RoleLifetime::kBackward:
    case RoleLifetime::kAccumulated:
    case RoleLifetime::kOptimizer:
      return false;
    case RoleLifetime::kState:
      return !IsFinalGradient(buffer.role) && !IsOptimizerMemory(buffer.role);
    case RoleLifetime::kScratch:
    case RoleLifetime::kPasses:
    case RoleLifetime::kPersistent:
      return true;
  }
  return true;
}

// Frees buffers that are not persistent: all of them, or those on their way.
Status Replayer::Impl::FreeTransient(bool all) {
  if (Result<bool> done = device_.Synchronize(); !done) return std::unexpected(std::move(done.error()));
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const auto buffer = static_cast<BufferId>(b);
    if (!alive_[buffer] || plan_.buffers[b].persistent || !(all || IsOnItsWay(buffer))) continue;
    if (Status status = Release(buffer); !status) return status;
  }
  return {};
}

Status Replayer::Impl::Leave() {
  if (failure_) return std::unexpected(*failure_);
  AbandonRecording();
  return FreeTransient(/*all=*/false);
}

Status Replayer::Impl::Restart() {
  if (collectives_aborted_) return std::unexpected(*failure_);
  failure_.reset();
  AbandonRecording();
  thrown_ = nullptr;
  steps_left_ += AtStepBegin() ? 0 : 1;
  in_trigger_ = op_begun_ = false;
  trigger_ = op_ = 0;
  procedure_ = -1;
  std::ranges::fill(bound_, -1);
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) std::ranges::fill(grads_made_[b], 0);
  return FreeTransient(/*all=*/true);
}

}  // namespace shardplan::executor
