// SPDX-License-Identifier: Apache-2.0
// The parameters that are communicated together (FSDPParamGroup in _fsdp_param_group.py).
//
// [Note: who keeps a buffer alive]
// Nothing in FSDP2 frees memory explicitly but the storage of unsharded parameters; everything else dies with
// its last Python reference. The frees emitted here stand where those references are dropped:
// - all_gather_output: in the forward a reference is kept (FsdpCommContext::AllGatherState) so that the next
//   unit's copy-in can overlap; it is dropped at the end of the next unit's wait_for_unshard, or in the
//   root's post_forward. In the backward it is dropped at the end of its own wait_for_unshard.
// - reduce_scatter_input: kept (FsdpCommContext::ReduceScatterState) until the next unit that reduces, or the
//   end of the backward.
// - reduce_scatter_output: see the note in foreach_reduce.h.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "policy/fault_list.h"
#include "policy/fsdp2/foreach_all_gather.h"
#include "policy/fsdp2/foreach_reduce.h"
#include "policy/fsdp2/fsdp_comm_context.h"
#include "policy/fsdp2/fsdp_param.h"
#include "policy/fsdp2/param_group_settings.h"
#include "policy/fsdp2/sharded_grads.h"
#include "policy/fsdp2/training_state.h"
#include "policy/fsdp2/unit_scope.h"
#include "policy/fsdp2/unsharded_grads.h"
#include "policy/optimizer_memory.h"
#include "shardplan/schemas/error.h"

namespace shardplan::fsdp2 {

class FsdpParamGroup {
 public:
  struct State {
    ParamGroupSettings settings;  // changed by the setters of FSDPModule
    // _training_state: changed by the hooks and by the final callback; for the time of a prefetch by another
    // group's.
    TrainingState training_state = TrainingState::kIdle;
    // lazy_init has run: in its root's, or in the user's first unshard.
    bool lazily_initialised = false;
    // comm_ctx: its own state's until its root's lazy init, or share_comm_ctx, gives it another.
    FsdpCommContext* comm_ctx = nullptr;
    // _all_gather_result: from Unshard to WaitForUnshard, or to FinalizeBackward.
    std::optional<AllGatherResult> all_gather_result;
    // _post_reduce_event: of the last PostBackward that reduced; cleared by the wait for it. -1: none.
    EventId post_reduce_event = -1;
    // _reshard_after_forward_event: of a reshard to the smaller mesh; cleared by the next Unshard. -1: none.
    EventId reshard_after_forward_event = -1;
    // _partial_reduce_output: reduced over the shards only (HSDP without all-reduce); taken by the next
    // reduction that all-reduces. -1: none.
    BufferId partial_reduce_output = -1;
    // _all_reduce_state: of the last PostBackward that all-reduced; cleared by the wait for it.
    std::optional<AllReduceState> all_reduce_state;
    // _post_backward_pending: what finalize_backward reduces. Set by a PostBackward that does not reduce, or
    // by the final callback; cleared by one that does.
    bool post_backward_pending = false;
    // _post_forward_indices: where it is in its comm_ctx's post_forward_order. Added to by PostForward, used
    // up by BackwardPrefetch, cleared by FinalizeBackward.
    std::vector<std::int32_t> post_forward_indices;
    bool operator==(const State&) const = default;
  };
  struct Snapshot {
    State group;
    FsdpParams::State params;
    UnshardedGrads::State unsharded_grads;
    ShardedGrads::State sharded_grads;
    bool operator==(const Snapshot&) const = default;
  };

  // `optimizer_in_backward`: null where none steps in the backward.
  FsdpParamGroup(const UnitScope& scope, ParamGroupSettings settings, FsdpCommContext& comm_ctx,
                 OptimizerMemory* optimizer_in_backward, FaultList& faults);
  FsdpParamGroup(const FsdpParamGroup&) = delete;
  FsdpParamGroup& operator=(const FsdpParamGroup&) = delete;

  // After the setters that are called before the first step.
  void SetUp() {
    if (state_.settings.keep_unsharded_storage) params_.KeepStorage();
  }
  void LazyInit() { state_.lazily_initialised = true; }

  // `reason`: of the instructions, why now. kBadInput, here and below: where PyTorch fails.
  Status Unshard(bool async_op, std::string_view reason);
  void WaitForUnshard();
  void Reshard();
  void ReshardAfterBackward();
  void ToSharded() { params_.ToSharded(); }

  // Hooks of the group's state. `recompute`: inside a recomputation in the backward.
  Status PreForward(bool recompute);
  void PostForward(bool recompute);
  // `prefetch`: no list says what to prefetch.
  Status PreBackward(bool prefetch);
  Status PostBackward(std::string_view reason);
  void FinalizeBackward();
  // FSDPParamGroup._reset_iter_state.
  void ResetIterState();
  // finalize_backward of the user's, of this group.
  Status FinalizeByUser();
  // Reduces over the replicas, and hands over, what an earlier PostBackward has reduced over the shards only.
  void ReducePartial(BufferId partial);
  // FSDPParamGroup._prefetch_unshard, of this group, in a hook of the unit `by`, which communicates on
  // `comm_ctx_of_by` and is in `pass`.
  Status PrefetchUnshard(const UnitScope& by, const FsdpCommContext& comm_ctx_of_by, TrainingState pass,
                         std::string_view reason);

  const UnitScope& scope() const { return scope_; }
  ParamGroupSettings& settings() { return state_.settings; }
  void SetCommContext(FsdpCommContext& comm_ctx) { state_.comm_ctx = &comm_ctx; }
  // The final callback: the next hook is the first of a backward or of a forward.
  void SetIdle() { state_.training_state = TrainingState::kIdle; }
  void SetTrainingState(TrainingState training_state) { state_.training_state = training_state; }
  void SetPostBackwardPending() { state_.post_backward_pending = true; }
  TrainingState training_state() const { return state_.training_state; }
  bool lazily_initialised() const { return state_.lazily_initialised; }
  bool is_unsharded() const { return params_.is_unsharded(); }
  bool is_gathering() const { return state_.all_gather_result.has_value(); }
  // Parameters that the next unshard or copy-out takes in place of the shards.
  bool holds_copies_of_shards() const { return is_gathering() || params_.is_sharded_post_forward(); }
  // The event of the gather that nothing has waited for; -1: there is none, or it is that of a single rank.
  EventId all_gather_event() const { return is_gathering() ? state_.all_gather_result->event : -1; }
  // Gradients, or a sum of them over the shards, that wait for a reduction.
  bool has_unreduced_grads() const {
    return unsharded_grads_.HasGrads() || state_.partial_reduce_output >= 0;
  }
  UnshardedGrads& unsharded_grads() { return unsharded_grads_; }
  ShardedGrads& sharded_grads() { return sharded_grads_; }
  const ShardedGrads& sharded_grads() const { return sharded_grads_; }
  // Behind this event the sharded gradients of its last backward are there. -1: some still wait for an
  // all-reduce, or the compute stream has waited for all.
  EventId reduced() const { return state_.partial_reduce_output < 0 ? state_.post_reduce_event : -1; }
  Snapshot snapshot() const {
    return {state_, params_.state(), unsharded_grads_.state(), sharded_grads_.state()};
  }

 private:
  FsdpCommContext& comm_ctx() const { return *state_.comm_ctx; }
  bool HasSmallerMesh() const;
  void ToSmallerMesh();
  void RecordPostForward();
  Status BackwardPrefetch();
  Status PrefetchAllGroupsBefore(std::int32_t last);
  void SetPostReduceEvent(StreamId stream, EventId event);
  void WaitForPostBackward();
  void DropReduced();
  std::size_t ReduceScatterMaxInputBuffers() const;
  Status CheckUnreduced() const;
  std::set<std::int32_t> ParametersWithZeros() const;
  void DropUnusedAllGather();

  const UnitScope& scope_;
  OptimizerMemory* const optimizer_in_backward_;
  FaultList& faults_;
  FsdpParams params_;
  UnshardedGrads unsharded_grads_;
  ShardedGrads sharded_grads_;
  State state_;
};

}  // namespace shardplan::fsdp2
