// SPDX-License-Identifier: Apache-2.0
// Runtime's part for what the user does at a point of the plan: calls, hooks on gradients, collectives of
// their own.
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "training/failure.h"
#include "training/runtime/runtime.h"

namespace shardplan::executor {

bool Runtime::PassUserCall(UnitId unit) {
  const std::optional<PlanPosition> call = tables_.order.NextUserCall(Position(), unit);
  if (!call) return false;
  for (bool last = false; !last;) {
    last = replayer_->trigger_index() == call->trigger && replayer_->step_index() == call->step;
    Fire(TriggerKey(replayer_->Expected()));
  }
  return true;
}

void Runtime::Unshard(UnitId unit) {
  if (fallback_.active()) return on_demand_.Unshard(unit);
  if (PassUserCall(unit) || units_[unit].unsharded) return;
  if (!BetweenSteps()) {
    throw TrainingError(ErrorCode::kUsage, fmt::format("the plan has no call of unshard of {} here ({})",
                                                       plan_->units[unit].fqn, Where()));
  }
  AdoptChanges();
  on_demand_.Unshard(unit);
}

void Runtime::Reshard(UnitId unit) {
  if (units_[unit].unplanned) return on_demand_.Reshard(unit);
  if (PassUserCall(unit) || !units_[unit].unsharded) return;
  throw TrainingError(ErrorCode::kUsage, fmt::format("the plan has no call of reshard of {} here ({})",
                                                     plan_->units[unit].fqn, Where()));
}

void Runtime::PassCall(UnitId unit, const std::string& method) {
  if (fallback_.active()) return;  // where every backward is finished when it ends
  if (PassUserCall(unit)) return handover_.PublishAll(/*zeros=*/false);
  throw TrainingError(ErrorCode::kUsage,
                      fmt::format("the plan has no call of {} here ({})", method, Where()));
}

Status Runtime::GradientsReduced(UnitId unit, BufferId buffer, StreamId stream) {
  UnitState& state = units_[unit];
  state.reduction_stream = stream;
  if (!state.reduction_hook) [[likely]] {
    return {};
  }
  Status status;
  const Status ran = device_->RunOn(stream, [&] {
    const InsideUserCode guards(lock_);
    try {
      state.reduction_hook(device_->Part(buffer, 0));
    } catch (const std::exception& error) {
      status = MakeError(ErrorCode::kInternal, error.what());
    }
  });
  return ran ? status : ran;
}

Status Runtime::ShardedGradientsReady(UnitId unit, BufferId buffer) {
  if (on_demand_.has_gradients_under_way()) return on_demand_.GradientsReady(unit, buffer);
  return handover_.Ready(unit, buffer);
}

bool Runtime::Reduces(UnitId unit) const {
  if (!user_.sync) return true;
  if (unit >= 0) return (*user_.sync)[unit];
  return std::ranges::any_of(*user_.sync, [](bool reduces) { return reduces; });
}

void Runtime::SetRequiresGradientSync(const std::vector<UnitId>& units, bool value) {
  if (!user_.sync) user_.sync.emplace(units_.size(), true);
  for (const UnitId unit : units) (*user_.sync)[unit] = value;
}

// The user has said whether this backward reduces. Does the plan do so, too?
void Runtime::FollowSetters() {
  if (!user_.sync || fallback_.active()) return;
  const PlanPosition next = tables_.order.NextHooked(Position());
  if (tables_.order.At(next).kind != TriggerKind::kPreBackward) return;  // deviates in any case
  const std::vector<UnitGradients>* planned = tables_.order.Gradients(next);
  if (planned == nullptr) return;
  std::optional<bool> differing;  // what the plan does with the first unit that differs: keeps its gradients?
  for (std::size_t unit = 0; unit < planned->size() && !differing; ++unit) {
    const UnitGradients does = (*planned)[unit];
    if (does != UnitGradients::kNone && (does == UnitGradients::kReduced) != (*user_.sync)[unit])
      differing = does == UnitGradients::kKept;
  }
  if (!differing) return;
  const bool keeps = *differing;
  const std::string found = fmt::format("a backward that {} gradients (set_requires_gradient_sync, no_sync)",
                                        keeps ? "reduces" : "does not reduce");
  Deviate(found, keeps ? "one that keeps them for a later micro-batch"
                       : "one that reduces them, as that of the last micro-batch");
}

bool Runtime::ReducesAll() const {
  return !user_.sync || std::ranges::all_of(*user_.sync, [](bool reduces) { return reduces; });
}

bool Runtime::FollowsLastBackward() const {
  return fallback_.active() && user_.awaits_optimizer && !user_.optimizer_seen &&
         now_.forward_root == kNoUnit && at::GradMode::is_enabled() && !now_.backward_end_queued &&
         fallback_.has_had_its_backwards() && now_.backwards > 0 && now_.reduced_all;
}

bool Runtime::BeginsForward() const {
  return now_.forward_root == kNoUnit && BetweenSteps() && !IsAnotherMicrobatch();
}

bool Runtime::BeginsStep() const { return at::GradMode::is_enabled() && BeginsForward(); }

// Does a forward come before a known optimizer steps, with gradients that are held?
bool Runtime::IsAnotherMicrobatch() const {
  return user_.awaits_optimizer && user_.optimizer_seen && at::GradMode::is_enabled() &&
         replayer_->Expected().kind == TriggerKind::kOptimizerStep && !handover_.IsDropped();
}

void Runtime::CheckIsNoMicrobatch() {
  if (!user_.awaits_optimizer || fallback_.active() || !at::GradMode::is_enabled()) return;
  if (replayer_->Expected().kind == TriggerKind::kUserCall &&
      tables_.order.NextUserCallsTakeGradients(Position()))
    return (void)Deviate("a forward", "finalize_backward(): this is another micro-batch");
  if (IsAnotherMicrobatch()) Deviate("a forward", "optimizer.step(): this is another micro-batch");
}

std::string Runtime::RequiresGradChange() const {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const UnitState& unit = units_[u];
    for (std::size_t i = 0; i < plan_->units[u].parameters.size(); ++i) {
      const bool expected = plan_->units[u].parameters[i].requires_grad;
      const bool found = unit.flat ? unit.flat->RequiresGrad(static_cast<std::int32_t>(i)).value_or(expected)
                                   : unit.parameters[i]->requires_grad();
      if (found == expected) continue;
      return fmt::format("{}: requires_grad expected {}, found {}: {}",
                         ParameterText(*plan_, static_cast<UnitId>(u), static_cast<std::int32_t>(i)),
                         expected, found, options_.after_freezing);
    }
  }
  return {};
}

std::vector<Fallback::Passed> Runtime::PlannedLog() const {
  const auto triggers = static_cast<std::int32_t>(plan_->steps[plan_->steady_step].triggers.size());
  return fallback_.PlannedLog({plan_->steady_step, triggers}, now_.modules);
}

void Runtime::OptimizerSteps() {
  const auto self = shared_from_this();  // the end of a fallback may replace this runtime
  // Optimizers in the backward are the plan's, or a hook's on a gradient.
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  user_.optimizer_seen = true;
  GiveUpIfInterrupted(now_.forward_root);  // nothing is stepped with gradients of half a backward
  if (fallback_.active()) {
    EndFallback();
  } else if (!BetweenSteps()) {
    Deviate("optimizer.step()");  // with fewer micro-batches, say
    EndFallback();
  } else if (replayer_->Expected().kind == TriggerKind::kOptimizerStep) {
    Fire(TriggerKey(replayer_->Expected()));  // it may wait for copies of what is stepped
  }
  on_demand_.AwaitShards();
}

void Runtime::OptimizerStepped() {
  if (recording_.recorder && torch::autograd::get_current_graph_task_id() == -1)
    OrThrow(recording_.recorder->EndSegment());
}

void Runtime::StartRecording(RecorderOptions options) {
  const ReleaseLock unlocked(lock_);
  OrThrow(replayer_->SetRecorder(nullptr));
  recording_.recorder = std::make_unique<StepRecorder>(*plan_, std::move(options));
  recording_.facts = device_->Facts();
  OrThrow(replayer_->SetRecorder(recording_.recorder.get()));
}

std::string ParameterText(const Plan& plan, UnitId unit, std::int32_t parameter) {
  return fmt::format("parameter {}", plan.units[unit].parameters[parameter].fqn);
}

std::string Runtime::StopRecording() {
  if (!recording_.recorder) return {};
  const ReleaseLock unlocked(lock_);
  OrThrow(replayer_->SetRecorder(nullptr));
  const std::unique_ptr<StepRecorder> recorder = std::move(recording_.recorder);
  Result<Recording> recording = recorder->Finish();
  if (!recording) Throw(recording.error());
  DeviceFacts facts = device_->Facts();
  facts.cache_releases -= recording_.facts.cache_releases;
  return ToJson(*recording, *plan_, rank_, facts);
}

void Runtime::EndFallback() {
  const auto self = shared_from_this();
  fallback_.CheckTogether(TriggerKind::kStepEnd, -1);
  const std::vector<UnitId> left = on_demand_.UnitsWithGradients();
  if (user_.optimizer_seen && !std::ranges::all_of(left, [&](UnitId unit) { return Reduces(unit); })) {
    throw TrainingError(
        ErrorCode::kUsage,
        "optimizer.step() is called while gradients are not reduced, because "
        "set_requires_gradient_sync(False) (no_sync) holds: call the last backward of a step without it");
  }
  fallback_.EndStep();
}

// An exception in a forward or backward ended that where nobody saw it. A model that is entered anew shows
// it: from outside of a backward, whose end never came, or where the outermost unit has not been left.
void Runtime::GiveUpIfInterrupted(UnitId entered) {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  const bool in_backward = now_.backward_end_queued;
  const bool in_forward = now_.forward_root == entered && now_.forward_root != kNoUnit;
  if (!in_backward && !in_forward) return;
  Abandon();
  options_.warn(fmt::format(
      "shardplan: the last {} was not finished (an exception?): its step is given up, and gradients "
      "made in it are dropped",
      in_backward ? "backward" : "forward"));
}

void Runtime::Abandon() {
  {
    const HoldLock held(lock_);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      UnitState& unit = units_[u];
      if (unit.unsharded) OrThrow(BindSharded(static_cast<UnitId>(u), -1));
      unit.in_backward = unit.backward_begun = unit.unplanned = false;
      unit.run_in_backward = -1;
      if (unit.flat) {
        unit.flat->Finish();
        unit.flat->DropGradient();
      }
      for (const auto& parameter : unit.parameters) parameter->sharded_grad() = at::Tensor();
    }
  }
  on_demand_.DropGradients();
  handover_.Forget();
  groups_.Forget();
  fallback_.Abandon();
  now_.forward_root = now_.evaluation_root = kNoUnit;
  now_.backward_end_queued = false;
  now_.full_precision_forwards.clear();
  now_.modules.clear();
  now_.backwards = 0;
  now_.unseen_backward = -1;
  const ReleaseLock unlocked(lock_);
  OrThrow(replayer_->Restart());
}

void Runtime::Restart() {
  on_demand_.ReshardAll();  // what the user gathered between steps
  const ReleaseLock unlocked(lock_);
  OrThrow(replayer_->Restart());
}

void Runtime::ShowShards(bool show) {
  for (const UnitState& unit : units_) {
    if (!unit.unsharded || unit.flat) continue;
    for (const auto& parameter : unit.parameters) {
      OrThrow(show ? parameter->BindSharded() : parameter->BindUnsharded());
    }
  }
}

}  // namespace shardplan::executor
