// The hooks of a backward and what follows it (_runtime_utils.py).
#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "policy/fsdp1/fsdp1_policy.h"

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
  const UndoneCalls calls = CallsUndoneBy(trace_.backwards[event.range.pass]);
  for (Handle& handle : handles_) {
    handle.undone.clear();
    for (const Use& use : handle.uses) {
      if (std::ranges::find(covered_, use.call.microbatch) != covered_.end()) handle.undone.push_back(use);
    }
    for (const std::set<Call>* kept : {&calls.reached, &calls.with_gradients}) {
      const auto is_kept = [&](const Use& use) { return kept->contains(use.call); };
      if (std::ranges::any_of(handle.undone, is_kept)) std::erase_if(handle.undone, std::not_fn(is_kept));
    }
    FindWhereItFires(handle);
  }
}

// Which calls of units a backward reaches, and in which of them a module's own parameters get gradients.
Fsdp1Policy::UndoneCalls Fsdp1Policy::CallsUndoneBy(const Pass& backward) const {
  UndoneCalls result;
  std::set<ParameterId> trained;
  std::set<std::tuple<ModuleId, std::int32_t, std::size_t>> ready;  // calls of modules, by covered forward
  for (const TraceEvent& event : backward.events) {
    if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) trained.insert(grad->parameter);
    const auto* output = std::get_if<OutputGradReadyEvent>(&event);
    if (output == nullptr || output->forward >= std::ssize(covered_)) continue;
    ready.insert({index_.canonical[output->module], output->occurrence, output->forward});
  }
  for (std::size_t f = 0; f < std::min(covered_.size(), backward.forwards.size()); ++f) {
    std::map<ModuleId, std::int32_t> calls;
    for (const TraceEvent& event : trace_.forwards[backward.forwards[f]].events) {
      const auto* enter = std::get_if<EnterEvent>(&event);
      if (enter == nullptr) continue;
      const ModuleId module = index_.canonical[enter->module];
      const std::int32_t occurrence = calls[module]++;
      if (!ready.contains({module, occurrence, f})) continue;
      const UnitId own = partition_.unit_of_module[module];
      if (own >= 0) result.reached.insert({own, occurrence, covered_[f]});
      const UnitId unit = partition_.managed_by[module];
      const auto trains = [&](const NamedParameter& named) { return trained.contains(named.parameter); };
      if (unit < 0 || !std::ranges::any_of(trace_.modules[module].parameters, trains)) continue;
      const ModuleId wrapped = index_.by_fqn.find(UnitOf(unit).fqn)->second;
      const auto entered = calls.find(index_.canonical[wrapped]);
      if (entered != calls.end()) result.with_gradients.insert({unit, entered->second - 1, covered_[f]});
    }
  }
  return result;
}

void Fsdp1Policy::FindWhereItFires(Handle& handle) {
  handle.fires.reset();
  if (!handle.hook) return;
  for (const Use& use : handle.undone) {
    if (handle.casts_params && use.views != *handle.hook) continue;
    handle.fires = use.views;
    return;
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
    handle.undone.clear();
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
