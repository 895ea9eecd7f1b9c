// The hooks of a backward and what follows it (_runtime_utils.py).
#include <algorithm>
#include <functional>
#include <set>

#include "fsdp1_policy.h"

namespace shardplan {

void Fsdp1Policy::PreBackward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Handle& handle = handles_[unit];
  builder_.BeginTrigger(TriggerKind::kPreBackward, unit, event.microbatch);
  if (handle.exists && handle.ran_pre_backward_hook) return;
  builder_.SetReason("pre_backward");
  if (partition_.units[unit].is_root) {
    if (!final_callback_queued_) DropZeroedGrads();
    final_callback_queued_ = true;
  }
  if (!handle.exists) return;
  backward_unit_ = unit;
  handle.training = TrainingState::kBackwardPre;
  if (handle.needs_pre_backward_unshard) {
    if (!handle.prefetched) Unshard(unit, "pre_backward");
    WaitForUnshard(unit);
  } else {
    not_gathered_again_ = true;
  }
  handle.needs_pre_backward_unshard = false;
  Prefetch(unit, /*forward=*/false);
  PrepareGrad(unit);
  handle.ran_pre_backward_hook = true;
}

// Finds where in this backward each unit's post_backward runs.
void Fsdp1Policy::OnBackwardBegin(const HostEvent& event) {
  backward_unit_ = -1;
  covered_ = event.microbatches;
  std::set<Call> reached;
  for (const TraceEvent& traced : trace_.backwards[event.range.pass].events) {
    const auto* ready = std::get_if<OutputGradReadyEvent>(&traced);
    if (ready == nullptr || ready->forward >= static_cast<std::int32_t>(covered_.size())) continue;
    const UnitId unit = partition_.unit_of_module[index_.canonical[ready->module]];
    if (unit >= 0) reached.insert({unit, ready->occurrence, covered_[ready->forward]});
  }
  for (Handle& handle : handles_) {
    handle.fires.reset();
    if (!handle.hook) continue;
    std::vector<Use> undone;
    for (const Use& use : handle.uses) {
      if (std::ranges::find(covered_, use.call.microbatch) != covered_.end()) undone.push_back(use);
    }
    const auto is_reached = [&](const Use& use) { return reached.contains(use.call); };
    if (std::ranges::any_of(undone, is_reached)) std::erase_if(undone, std::not_fn(is_reached));
    for (const Use& use : undone) {
      if (handle.casts_params && use.views != *handle.hook) continue;
      handle.fires = use.views;
      break;
    }
  }
}

// post_backward of every unit whose views were made in this pre-forward; a prefetched unit's are the newer.
void Fsdp1Policy::OnForwardUndone(const HostEvent& event) {
  const Call call{event.unit, event.occurrence, event.microbatch};
  const auto fire = [&](UnitId unit) {
    Handle& handle = handles_[unit];
    if (handle.fires == call && !handle.grads.empty()) PostBackward(unit, event.microbatch);
  };
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    if (static_cast<UnitId>(u) != call.unit) fire(static_cast<UnitId>(u));
  }
  fire(call.unit);
}

// What is left in the end: gradients of views that were made in a forward which this backward does not cover,
// and gradients without a hook.
void Fsdp1Policy::BackwardEnd(const HostEvent& event) {
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    if (!handles_[u].grads.empty() && handles_[u].fires)
      PostBackward(static_cast<UnitId>(u), event.microbatch);
  }
  builder_.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  backward_unit_ = -1;
  builder_.SetReason("autograd");
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    Handle& handle = handles_[u];
    if (!handle.grads.empty()) {
      builder_.SetUnit(static_cast<UnitId>(u));
      GatherFlatGrad(static_cast<UnitId>(u));
      missed_hook_ = true;
    }
    std::erase_if(handle.uses, [&](const Use& use) {
      return std::ranges::find(covered_, use.call.microbatch) != covered_.end();
    });
    handle.fires.reset();
  }
  if (final_callback_queued_) FinalCallback();
}

// The reshard of a frozen unit.
void Fsdp1Policy::OnInputsGradDone(const HostEvent& event) {
  Handle& handle = handles_[event.unit];
  if (handle.hooked_inputs != Call{event.unit, event.occurrence, event.microbatch}) return;
  builder_.BeginTrigger(TriggerKind::kPostBackward, event.unit, event.microbatch);
  builder_.SetReason("reshard_only");
  handle.training = TrainingState::kBackwardPost;
  PostBackwardReshard(event.unit);
}

void Fsdp1Policy::FinalCallback() {
  builder_.SetUnit(-1);
  builder_.SetReason("final");
  if (sync_gradients_) {
    builder_.WaitStream(kCompute, post_backward_stream_, "backward_end.post_backward");
    if (all_reduce_stream_ >= 0) builder_.WaitStream(kCompute, all_reduce_stream_, "backward_end.all_reduce");
    if (partition_.units[0].cpu_offload) {  // the root's: gradients have to be in host memory
      const EventId offloaded = builder_.Event("backward_end.offload");
      builder_.Record(offloaded, kCompute);
      builder_.HostWait(offloaded);
    }
  }
  first_iteration_ = false;
  post_forward_order_.clear();
  for (const UnitId unit : partition_.states) {
    Handle& handle = handles_[unit];
    if (!handle.exists) continue;
    builder_.SetUnit(unit);
    if (!handle.points_to_shard || handle.skipped_sharded_views) Reshard(unit, FreesInBackward(handle));
    if (sync_gradients_ && handle.requires_grad) FinishGrad(unit);
    handle.hook.reset();
    handle.ran_pre_backward_hook = handle.needs_pre_backward_unshard = handle.prefetched = false;
    handle.post_forward_index.reset();
    handle.training = TrainingState::kIdle;
    handle.hooked_inputs.reset();
  }
  final_callback_queued_ = false;
}

}  // namespace shardplan
