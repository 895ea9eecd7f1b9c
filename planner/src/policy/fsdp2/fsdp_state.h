// SPDX-License-Identifier: Apache-2.0
// One call of fully_shard: its hooks, and what it shares with the other states of its root (FSDPState in
// _fsdp_state.py).
//
// [Note: who is a root]
// The first state that runs a forward is the root of all states under its module. A model on whose root
// fully_shard was not called has several, each with contexts of its own: streams, prefetch order, the flag of
// the last backward. share_comm_ctx gives several roots one communication context; every root's first
// forward initialises it again, with new streams and an empty prefetch order.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "order/record_order.h"
#include "policy/fault_list.h"
#include "policy/fsdp2/fsdp_comm_context.h"
#include "policy/fsdp2/fsdp_param_group.h"
#include "policy/fsdp2/fsdp_state_context.h"
#include "policy/fsdp2/training_state.h"
#include "policy/fsdp2/unit_scope.h"
#include "policy/optimizer_memory.h"
#include "shardplan/schemas/error.h"

namespace shardplan::fsdp2 {

class ModuleStates;

class FsdpState {
 public:
  struct State {
    // _is_root: known once the root above it, or the state itself, has been lazily initialised.
    std::optional<bool> is_root;
    // _training_state: changed by the hooks and by the final callback.
    TrainingState training_state = TrainingState::kIdle;
    // _auto_reshard_after_forward: reshard_after_forward was not given. Cleared by set_reshard_after_forward.
    bool auto_reshard_after_forward = true;
    // _modules_to_run_forward is not empty: a forward has entered the group's modules, and not left the last.
    // Set by PreForward, cleared by PostForward and by the final callback.
    bool modules_to_run_forward = false;
    // _states_to_forward_prefetch, _states_to_backward_prefetch: set by the setters of FSDPModule.
    std::vector<FsdpState*> states_to_forward_prefetch;
    std::vector<FsdpState*> states_to_backward_prefetch;
    // _state_ctx, _comm_ctx: its own until LazyInit, or share_comm_ctx, gives it another state's.
    FsdpStateContext* state_ctx = nullptr;
    FsdpCommContext* comm_ctx = nullptr;
    bool operator==(const State&) const = default;
  };
  struct Snapshot {
    State state;
    FsdpStateContext own_state_ctx;
    FsdpCommContext::State own_comm_ctx;
    std::optional<FsdpParamGroup::Snapshot> group;
    bool operator==(const Snapshot&) const = default;
  };

  // A unit without parameters has no group. `optimizer_in_backward`: null where none steps in the backward.
  FsdpState(const UnitScope& scope, const ParamGroupSettings& settings,
            OptimizerMemory* optimizer_in_backward, FaultList& faults);
  FsdpState(const FsdpState&) = delete;
  FsdpState& operator=(const FsdpState&) = delete;

  // The hooks, and what they emit. kBadInput: where PyTorch fails.
  Status PreForward(const HookPoint& event, const ModuleStates& model);
  void PostForward(const HookPoint& event);
  // `final_callbacks`: the autograd engine's, run at the end of the backward in this order.
  Status PreBackward(const HookPoint& event, std::vector<FsdpState*>& final_callbacks);
  Status PostBackward(const HookPoint& event);
  Status RootPostBackwardFinalCallback();

  // set_manual_backward_finalization, finalize_backward and the wait of its handle, of a root.
  Status SetManualBackwardFinalization(bool enabled);
  Status FinalizeBackwardByUser(bool async_op);
  Status WaitForGradientReduction();
  // FSDPModule.reset_iter_state: what a pass that raised has left is waited for and dropped.
  Status ResetIterState();

  // The state becomes the root of all states under its module.
  Status LazyInit(const ModuleStates& model);
  // share_comm_ctx.
  void ShareCommContext(FsdpCommContext& comm_ctx);

  const UnitScope& scope() const { return scope_; }
  FsdpParamGroup* group() { return group_ ? &*group_ : nullptr; }
  bool lazily_initialised() const { return state_.is_root.has_value(); }
  bool is_root() const { return state_.is_root.value_or(false); }
  FsdpStateContext& state_ctx() { return *state_.state_ctx; }
  FsdpCommContext& comm_ctx() { return *state_.comm_ctx; }
  std::vector<FsdpState*>& states_to_forward_prefetch() { return state_.states_to_forward_prefetch; }
  std::vector<FsdpState*>& states_to_backward_prefetch() { return state_.states_to_backward_prefetch; }
  // set_reshard_after_forward: after the forward the parameters are on so many ranks; 0: not resharded.
  void SetReshardAfterForward(std::int64_t ranks);
  Snapshot snapshot() const;

 private:
  void RootPreForward();
  void CompleteGroups();
  Status PrefetchStates(const std::vector<FsdpState*>& targets, TrainingState pass, std::string_view reason);
  Status EndBackward(bool is_last_backward, bool manual);
  void EndBackwardIteration();
  void FinalizeBackward();

  const UnitScope scope_;
  FaultList& faults_;
  FsdpStateContext own_state_ctx_;
  FsdpCommContext own_comm_ctx_;
  std::optional<FsdpParamGroup> group_;
  State state_;
};

}  // namespace shardplan::fsdp2
