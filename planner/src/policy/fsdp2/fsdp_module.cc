// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/fsdp_module.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/program.h"

namespace shardplan::fsdp2 {
namespace {

// Setters of a flag of parameter groups: of the module's own, or of all under it.
struct FlagSetter {
  std::string_view method;
  bool recurses = false;
  bool ParamGroupSettings::*flag = nullptr;
  bool ParamGroupSettings::*second_flag = nullptr;
};

constexpr std::array kFlagSetters = {
    FlagSetter{"set_requires_gradient_sync", true, &ParamGroupSettings::reduce_grads,
               &ParamGroupSettings::all_reduce_grads},
    FlagSetter{"set_requires_all_reduce", true, &ParamGroupSettings::all_reduce_grads},
    FlagSetter{"set_reshard_after_backward", true, &ParamGroupSettings::reshard_after_backward},
    FlagSetter{"_set_unshard_async_op", true, &ParamGroupSettings::unshard_async_op},
    FlagSetter{"set_separate_reduce_scatter_group", true, &ParamGroupSettings::separate_reduce_scatter_group},
    FlagSetter{"set_keep_unsharded_storage", true, &ParamGroupSettings::keep_unsharded_storage},
    FlagSetter{"set_reduce_scatter_unused_params", true, &ParamGroupSettings::reduce_scatter_unused_params},
    FlagSetter{"set_force_sum_reduction_for_comms", false,
               &ParamGroupSettings::force_sum_reduction_for_comms},
    FlagSetter{"set_unshard_in_backward", false, &ParamGroupSettings::unshard_in_backward},
    FlagSetter{"set_allocate_memory_from_process_group_for_comm", false,
               &ParamGroupSettings::allocate_memory_from_process_group},
};

// The states that a setter of `own` reaches.
std::vector<FsdpState*> Reached(const ModuleStates& model, const ModuleCall& call, FsdpState& own) {
  return call.recurse ? model.StatesUnder(call.module) : model.GroupsOf(own);
}

void SetFlag(const FlagSetter& setter, bool value, FsdpState& state) {
  if (state.group() == nullptr) return;
  ParamGroupSettings& settings = state.group()->settings();
  settings.*setter.flag = value;
  if (setter.second_flag != nullptr) settings.*setter.second_flag = value;
}

void SetReduceScatterMaxInputBuffers(double number, const std::vector<FsdpState*>& states) {
  for (FsdpState* state : states) {
    if (state->group() == nullptr) continue;
    state->group()->settings().reduce_scatter_max_input_buffers = static_cast<std::size_t>(number);
  }
}

}  // namespace

Status FsdpModule::SetPrefetch(const ModuleCall& call, FsdpState& own, PrefetchPass pass) const {
  std::vector<FsdpState*> states;
  for (const std::string& fqn : call.modules) {
    states.push_back(model_.Find(fqn));
    if (states.back() == nullptr) return MakeInputError("", "there is no such unit", fqn);
  }
  model_.SetPrefetch(own, states, pass);
  return {};
}

// The user records the event when he sets it.
void FsdpModule::SetPostOptimEvent(FsdpState& state, bool in_setup) {
  const EventId event = program_.Event("post_optim");
  state.state_ctx().post_optim_event = event;
  if (!in_setup) program_.Record(event, kCompute);
}

Status FsdpModule::Set(const ModuleCall& call, bool in_setup) {
  const Result<FsdpState*> found = model_.OfModule(call.module);
  if (!found) return std::unexpected(found.error());
  FsdpState& own = **found;
  const bool value = call.value.value_or(true);
  const auto flag = std::ranges::find(kFlagSetters, call.method, &FlagSetter::method);
  if (flag != kFlagSetters.end()) {
    const std::vector<FsdpState*> states = flag->recurses ? Reached(model_, call, own) : model_.GroupsOf(own);
    for (FsdpState* state : states) SetFlag(*flag, value, *state);
  } else if (call.method == "set_reshard_after_forward") {
    for (FsdpState* state : Reached(model_, call, own)) {
      state->SetReshardAfterForward(value ? state->scope().shard_ranks() : 0);
    }
  } else if (call.method == "set_is_last_backward") {
    own.state_ctx().is_last_backward = value;
  } else if (call.method == "set_manual_backward_finalization") {
    return own.SetManualBackwardFinalization(value);
  } else if (call.method == "set_post_optim_event") {
    SetPostOptimEvent(own, in_setup);
  } else if (call.method == "set_modules_to_forward_prefetch") {
    return SetPrefetch(call, own, PrefetchPass::kForward);
  } else if (call.method == "set_modules_to_backward_prefetch") {
    return SetPrefetch(call, own, PrefetchPass::kBackward);
  } else if (call.method == "set_gradient_divide_factor") {
    for (FsdpState* state : model_.GroupsOf(own)) {
      if (state->group() != nullptr) state->group()->settings().gradient_divide_factor = call.number;
    }
  } else {
    SHARDPLAN_ASSERT(call.method == "set_reduce_scatter_max_input_buffers" && call.number,
                     "CheckStrategy lets the calls of Fsdp2PolicyKnobs through");
    SetReduceScatterMaxInputBuffers(*call.number, Reached(model_, call, own));
  }
  return {};
}

Status FsdpModule::SetUp(const ModuleCall& call) { return Set(call, /*in_setup=*/true); }

// Outside a hook the group's state is idle, so the current stream is used. unshard(async_op) waits only when
// it is synchronous.
Status FsdpModule::Unshard(const std::vector<FsdpParamGroup*>& groups, bool async_op) const {
  for (FsdpParamGroup* group : groups) {
    group->LazyInit();
    if (Status s = group->Unshard(async_op, "user"); !s) return s;
  }
  if (!async_op) WaitForUnshard(groups);
  return {};
}

void FsdpModule::WaitForUnshard(const std::vector<FsdpParamGroup*>& groups) const {
  for (FsdpParamGroup* group : groups) {
    program_.SetUnit(group->scope().id());
    group->WaitForUnshard();
  }
}

// A group's lazy init hooks the modules whose parameters it manages: it is resharded before their states are
// read or written.
void FsdpModule::ReshardForStateDict(const ModuleCall& call) {
  for (FsdpState* state : model_.ManagersUnder(call.module)) {
    if (state->group() == nullptr || !state->group()->lazily_initialised()) continue;
    program_.SetUnit(state->scope().id());
    state->group()->ToSharded();
  }
}

Status FsdpModule::Call(const HookPoint& event) {
  program_.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  program_.SetReason("user");
  const ModuleCall& call = *event.call;
  std::vector<FsdpParamGroup*> groups;
  for (FsdpState* state : event.unit < 0 ? std::vector<FsdpState*>() : model_.GroupsOf(model_[event.unit])) {
    if (state->group() != nullptr) groups.push_back(state->group());
  }
  if (call.method == "unshard") {
    return Unshard(groups, call.value.value_or(false));
  } else if (call.method == "wait_for_unshard") {  // UnshardHandle.wait
    WaitForUnshard(groups);
  } else if (call.method == "finalize_backward" || call.method == "wait_for_gradient_reduction" ||
             IsReset(call)) {
    const Result<FsdpState*> state = model_.OfModule(call.module);
    if (!state) return std::unexpected(state.error());
    if (IsReset(call)) return (*state)->ResetIterState();
    if (call.method == "wait_for_gradient_reduction") return (*state)->WaitForGradientReduction();
    return (*state)->FinalizeBackwardByUser(/*async_op=*/call.value.value_or(false));
  } else if (call.method == "reshard") {
    for (FsdpParamGroup* group : groups) {
      program_.SetUnit(group->scope().id());
      group->Reshard();
    }
  } else if (call.method == "state_dict" || call.method == "load_state_dict") {
    ReshardForStateDict(call);
  } else {
    return Set(call, /*in_setup=*/false);
  }
  return {};
}

}  // namespace shardplan::fsdp2
