// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/fsdp_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "policy/fsdp2/module_states.h"
#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp2 {

namespace {

void KeepFirst(std::vector<FsdpState*>& states) {
  std::vector<FsdpState*> seen;
  std::erase_if(states, [&](FsdpState* state) {
    if (std::ranges::find(seen, state) != seen.end()) return true;
    seen.push_back(state);
    return false;
  });
}

// The groups of a module in the order of its backward.
std::vector<FsdpState*> LastGroupsFirst(std::vector<FsdpState*> states) {
  for (auto first = states.begin(); first != states.end();) {
    const auto last = first + (*first)->scope().choice().groups;
    std::reverse(first, last);
    first = last;
  }
  return states;
}

// The cap of the one list of reduce-scatters in flight: the largest of all units.
std::size_t LargestCap(const std::vector<FsdpState*>& states) {
  std::size_t cap = 1;
  for (FsdpState* state : states) {
    if (state->group() == nullptr) continue;
    cap = std::max(cap, state->group()->settings().reduce_scatter_max_input_buffers);
  }
  return cap;
}

}  // namespace

FsdpState::FsdpState(const UnitScope& scope, const ParamGroupSettings& settings,
                     OptimizerMemory* optimizer_in_backward, FaultList& faults)
    : scope_(scope), faults_(faults), own_comm_ctx_(scope.program()) {
  state_.auto_reshard_after_forward = !scope.choice().reshard_given;
  state_.state_ctx = &own_state_ctx_;
  state_.comm_ctx = &own_comm_ctx_;
  if (!scope.unit().parameters.empty()) {
    group_.emplace(scope_, settings, own_comm_ctx_, optimizer_in_backward, faults);
  }
}

void FsdpState::ShareCommContext(FsdpCommContext& comm_ctx) {
  state_.comm_ctx = &comm_ctx;
  if (group_) group_->SetCommContext(comm_ctx);
}

void FsdpState::SetReshardAfterForward(std::int64_t ranks) {
  state_.auto_reshard_after_forward = false;
  if (group_) group_->settings().post_forward_ranks = ranks;
}

Status FsdpState::LazyInit(const ModuleStates& model) {
  SHARDPLAN_ASSERT(!lazily_initialised(), "a state is initialised once");
  const UnitChoice& choice = scope_.choice();
  if (choice.modules.size() > 1) {
    return MakeInputError("/units", "a group of modules cannot be a root: FSDP needs a single root module",
                          choice.unit.fqn, "a unit around it, or shard_root");
  }
  FsdpStateContext& context = state_ctx();
  context.all_states = model.StatesUnder(choice.modules.front());
  if (scope_.rules().groups_are_listed_once) KeepFirst(context.all_states);
  for (const FsdpState* state : context.all_states) {
    if (state != this && state->state_.state_ctx->manual_backward_finalization) {
      return MakeInputError("/setup", "PyTorch fails here: set_manual_backward_finalization is of the root",
                            state->scope_.Name(), "the root");
    }
    if (state != this && state->lazily_initialised()) {
      return MakeInputError("/units", "PyTorch requires running forward through the root module first",
                            fmt::format("{} ran before {}", state->scope_.Name(), scope_.Name()));
    }
  }
  // Its parameters would be gathered again at once.
  for (FsdpState* state : model.GroupsOf(*this)) {
    if (!state->group_ || !state->state_.auto_reshard_after_forward) continue;
    state->group_->settings().post_forward_ranks = 0;
  }
  comm_ctx().LazyInit(model.CountRoots());
  for (FsdpState* state : context.all_states) {
    state->state_.is_root = state == this;
    state->state_.state_ctx = &context;
    state->ShareCommContext(comm_ctx());
    if (state->group_) state->group_->LazyInit();
  }
  comm_ctx().SetReduceScatterMaxInputBuffers(LargestCap(context.all_states));
  return {};
}

// Once per forward: all-gathers wait for the optimizer.
void FsdpState::RootPreForward() {
  FsdpStateContext& context = state_ctx();
  if (context.iter_forward_root != nullptr) return;
  context.iter_forward_root = this;
  EventId event = std::exchange(context.post_optim_event, -1);
  if (event < 0) {
    ProgramBuilder& program = scope_.program();
    event = scope_.choice().is_root ? program.Event("forward_begin") : scope_.Event("forward_begin");
    program.Record(event, kCompute);
  }
  comm_ctx().WaitAllGatherStreamsOnEvent(event);
}

Status FsdpState::PreForward(const HookPoint& event, const ModuleStates& model) {
  scope_.program().BeginTrigger(TriggerKind::kPreForward, scope_.id(), event.microbatch);
  if (state_ctx().gradient_reduction_pending) {
    return MakeInputError("/program",
                          "PyTorch fails here (RuntimeError): the previous gradient reduction must be waited "
                          "for before forward",
                          scope_.Name(), "wait_for_gradient_reduction");
  }
  if (state_.training_state == TrainingState::kPreBackward) {
    // Inside a recomputation that this unit's own pre-backward is responsible for.
    if (group_ && !group_->is_unsharded()) {
      if (Status s = group_->Unshard(false, "recompute"); !s) return s;
      group_->WaitForUnshard();
    }
    return {};
  }
  const bool each_member = scope_.rules().members_enter_one_by_one;
  const bool begins = !each_member || state_.training_state != TrainingState::kForward;
  state_.training_state = TrainingState::kForward;
  const bool recompute = event.kind == HookPointKind::kRecomputePreForward;
  scope_.program().SetReason(recompute ? "recompute" : "pre_forward");
  if (!lazily_initialised()) {
    if (Status s = LazyInit(model); !s) return s;
  }
  if (begins) RootPreForward();
  if (group_) {
    state_.modules_to_run_forward = !recompute;
    if (Status s = group_->PreForward(recompute); !s) return s;
  }
  if (!begins || !scope_.IsLastGroup()) return {};
  return PrefetchStates(state_.states_to_forward_prefetch, TrainingState::kForward, "prefetch_forward");
}

Status FsdpState::PrefetchStates(const std::vector<FsdpState*>& targets, TrainingState pass,
                                 std::string_view reason) {
  for (FsdpState* target : targets) {
    if (!target->group_) continue;
    if (Status s = target->group_->PrefetchUnshard(scope_, comm_ctx(), pass, reason); !s) return s;
  }
  return {};
}

void FsdpState::PostForward(const HookPoint& event) {
  scope_.program().BeginTrigger(TriggerKind::kPostForward, scope_.id(), event.microbatch);
  scope_.program().SetReason("post_forward");
  if (state_.training_state == TrainingState::kPreBackward) return;
  if (group_) {
    state_.modules_to_run_forward = false;
    group_->PostForward(event.kind == HookPointKind::kRecomputePostForward);
  }
  state_.training_state = TrainingState::kIdle;
  const FsdpState* root = state_ctx().iter_forward_root;
  if (root == nullptr || root->scope_.choice().modules != scope_.choice().modules || !scope_.IsLastGroup())
    return;
  if (scope_.rules().members_enter_one_by_one) CompleteGroups();
  if (const auto kept = comm_ctx().TakeAllGather()) comm_ctx().Free(*kept);
  state_ctx().iter_forward_root = nullptr;
}

// Groups of which a module has not run in this forward.
void FsdpState::CompleteGroups() {
  for (FsdpState* state : state_ctx().all_states | std::views::reverse) {
    const bool is_group = state->scope_.choice().modules.size() > 1;
    if (state == this || !is_group || !std::exchange(state->state_.modules_to_run_forward, false)) continue;
    scope_.program().SetUnit(state->scope_.id());
    if (state->group_) state->group_->PostForward(/*recompute=*/false);
    state->state_.training_state = TrainingState::kIdle;
  }
  scope_.program().SetUnit(scope_.id());
}

Status FsdpState::PreBackward(const HookPoint& event, std::vector<FsdpState*>& final_callbacks) {
  scope_.program().BeginTrigger(TriggerKind::kPreBackward, scope_.id(), event.microbatch);
  state_.training_state = TrainingState::kPreBackward;
  if (!std::exchange(state_ctx().post_backward_final_callback_queued, true)) final_callbacks.push_back(this);
  if (group_) {
    if (Status s = group_->PreBackward(state_.states_to_backward_prefetch.empty()); !s) return s;
  }
  if (!scope_.IsLastGroup()) return {};
  return PrefetchStates(state_.states_to_backward_prefetch, TrainingState::kPreBackward,
                        "prefetch_backward_explicit");
}

Status FsdpState::PostBackward(const HookPoint& event) {
  if (!group_) return {};
  scope_.program().BeginTrigger(TriggerKind::kPostBackward, scope_.id(), event.microbatch);
  return group_->PostBackward("autograd");
}

Status FsdpState::RootPostBackwardFinalCallback() {
  FsdpStateContext& context = state_ctx();
  if (scope_.rules().members_enter_one_by_one) context.iter_forward_root = nullptr;
  const bool two_phases = scope_.rules().backward_ends_in_two_phases;
  for (FsdpState* state : LastGroupsFirst(context.all_states)) {
    if (Status s = state->EndBackward(context.is_last_backward, context.manual_backward_finalization); !s) {
      return s;
    }
    if (!two_phases && context.is_last_backward) state->FinalizeBackward();
  }
  if (context.is_last_backward && !context.manual_backward_finalization) {
    EndBackwardIteration();
  } else if (two_phases) {
    scope_.program().SetUnit(-1);
    scope_.program().SetReason("finalize");
    comm_ctx().ReleaseAllGatherOnComputeStream();
  }
  context.post_backward_final_callback_queued = false;
  return {};
}

void FsdpState::EndBackwardIteration() {
  ProgramBuilder& program = scope_.program();
  program.SetUnit(-1);
  program.SetReason("finalize");
  if (scope_.rules().one_wait_a_stream) comm_ctx().WaitForLastReductions();
  const bool two_phases = scope_.rules().backward_ends_in_two_phases;
  if (two_phases) {
    for (FsdpState* state : state_ctx().all_states) state->FinalizeBackward();
    comm_ctx().ReleaseAllGatherOnComputeStream();
  }
  program.SetUnit(-1);
  comm_ctx().post_forward_order().clear();
  two_phases ? comm_ctx().FinishReduceScatters() : comm_ctx().WaitForReduceScatters(0);
}

Status FsdpState::SetManualBackwardFinalization(bool enabled) {
  if (lazily_initialised() && !is_root()) {
    return MakeInputError("", "PyTorch fails here: set_manual_backward_finalization is of the root",
                          scope_.Name(), "the root");
  }
  state_ctx().manual_backward_finalization = enabled;
  return {};
}

Status FsdpState::FinalizeBackwardByUser(bool async_op) {
  FsdpStateContext& context = state_ctx();
  if (!lazily_initialised()) return {};
  const auto fails = [&](std::string_view why) {
    return MakeInputError("/program", fmt::format("PyTorch fails here (RuntimeError): {}", why),
                          scope_.Name());
  };
  if (!is_root()) return fails("finalize_backward is called on another module than the root");
  if (!context.manual_backward_finalization) {
    return fails("finalize_backward requires set_manual_backward_finalization(True) before the forward");
  }
  if (context.gradient_reduction_pending) return fails("the reduction before has not been waited for");
  for (FsdpState* state : context.all_states | std::views::reverse) {
    if (!state->group_) continue;
    if (Status s = state->group_->FinalizeByUser(); !s) return s;
  }
  context.gradient_reduction_pending = async_op;
  if (!async_op) EndBackwardIteration();
  return {};
}

Status FsdpState::WaitForGradientReduction() {
  if (!std::exchange(state_ctx().gradient_reduction_pending, false)) return {};
  EndBackwardIteration();
  return {};
}

Status FsdpState::ResetIterState() {
  if (!lazily_initialised()) return {};
  if (!is_root()) {
    return MakeInputError(
        "/program",
        "PyTorch fails here (RuntimeError): reset_iter_state is called on another module than the root",
        scope_.Name());
  }
  ProgramBuilder& program = scope_.program();
  program.SetUnit(-1);
  program.SetReason("reset");
  comm_ctx().ReleaseAllGatherOnComputeStream();
  comm_ctx().FinishReduceScatters();
  comm_ctx().WaitForLastReductions();
  comm_ctx().post_forward_order().clear();
  for (FsdpState* state : state_ctx().all_states) {
    state->state_.modules_to_run_forward = false;
    state->state_.training_state = TrainingState::kIdle;
    program.SetUnit(state->scope_.id());
    if (state->group_) state->group_->ResetIterState();
  }
  FsdpStateContext& context = state_ctx();
  context.iter_forward_root = nullptr;
  context.post_backward_final_callback_queued = false;
  context.gradient_reduction_pending = false;
  return {};
}

// A unit whose inputs need no gradient has had no post-backward.
Status FsdpState::EndBackward(bool is_last_backward, bool manual) {
  scope_.program().SetUnit(scope_.id());
  if (group_ && group_->training_state() != TrainingState::kPostBackward) {
    if (manual && group_->settings().reduce_grads) {
      group_->SetPostBackwardPending();
    } else if (Status s = group_->PostBackward("final"); !s) {
      return s;
    }
  }
  state_.training_state = TrainingState::kIdle;
  if (group_) group_->SetIdle();
  if (state_.modules_to_run_forward && !is_last_backward && scope_.choice().modules.size() > 1 &&
      !scope_.rules().members_enter_one_by_one) {
    faults_.Add(PyTorchFault::kFsdp2GroupNotUnsharded);
  }
  state_.modules_to_run_forward = false;
  return {};
}

void FsdpState::FinalizeBackward() {
  scope_.program().SetUnit(scope_.id());
  scope_.program().SetReason("finalize");
  if (group_) group_->FinalizeBackward();
}

FsdpState::Snapshot FsdpState::snapshot() const {
  Snapshot snapshot{.state = state_, .own_state_ctx = own_state_ctx_, .own_comm_ctx = own_comm_ctx_.state()};
  if (group_) snapshot.group = group_->snapshot();
  return snapshot;
}

}  // namespace shardplan::fsdp2
