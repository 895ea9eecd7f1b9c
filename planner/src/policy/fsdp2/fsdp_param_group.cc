// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/fsdp_param_group.h"

#include <cassert>
#include <string>
#include <utility>

namespace shardplan::fsdp2 {

FsdpParamGroup::FsdpParamGroup(const UnitScope& scope, ParamGroupSettings settings, FsdpCommContext& comm_ctx,
                               OptimizerMemory* optimizer_in_backward, FaultList& faults)
    : scope_(scope),
      optimizer_in_backward_(optimizer_in_backward),
      faults_(faults),
      params_(scope),
      unsharded_grads_(scope),
      sharded_grads_(scope),
      state_{.settings = settings, .comm_ctx = &comm_ctx} {}

Status FsdpParamGroup::Unshard(bool async_op, std::string_view reason) {
  if (state_.all_gather_result || params_.is_unsharded()) return {};
  if (!state_.settings.unshard_in_backward && state_.training_state == TrainingState::kPreBackward) {
    faults_.Add(PyTorchFault::kFsdp2NoUnshardInBackward);
    return {};
  }
  if (params_.is_sharded_post_forward() && state_.settings.post_forward_ranks == 0) {
    return MakeInputError("/program",
                          "PyTorch fails here (Expected mesh_info to be FSDPMeshInfo): the reshard after the "
                          "forward is turned off while the parameters are on a smaller mesh",
                          scope_.Name());
  }
  ProgramBuilder& program = scope_.program();
  const UnitId caller = program.unit();
  const std::string caller_reason = program.reason();
  program.SetUnit(scope_.id());
  program.SetReason(reason);
  if (state_.reshard_after_forward_event >= 0) {
    comm_ctx().WaitAllGatherStreamsOnEvent(std::exchange(state_.reshard_after_forward_event, -1));
  }
  if (scope_.shard_ranks() == 1) {
    state_.all_gather_result = AllGatherResult{};
  } else {
    // A unit that runs twice in a row gathers anew while its last output is still kept.
    state_.all_gather_result =
        ForeachAllGather(scope_, params_,
                         {.streams = comm_ctx().GetAllGatherStreams(async_op, state_.training_state),
                          .async_op = async_op,
                          .from_process_group = state_.settings.allocate_memory_from_process_group,
                          .second = comm_ctx().KeepsFirstOutputOf(scope_.id())});
  }
  program.SetUnit(caller);
  program.SetReason(caller_reason);
  return {};
}

void FsdpParamGroup::WaitForUnshard() {
  if (!state_.all_gather_result) return;
  const AllGatherResult result = *std::exchange(state_.all_gather_result, std::nullopt);
  FsdpCommContext& comm = comm_ctx();
  const bool single = scope_.shard_ranks() == 1;
  const bool forward = state_.training_state == TrainingState::kForward;
  // Without gathers_are_freed_before_copy_out a local variable names the previous result until
  // wait_for_unshard returns.
  std::optional<FsdpCommContext::AllGatherState> previous;
  if (forward) previous = comm.TakeAllGather();
  if (previous && scope_.rules().gathers_are_freed_before_copy_out) {
    comm.Free(*std::exchange(previous, std::nullopt));
  }
  if (single) {
    params_.AllocAllGatherOutputs();
    params_.CopyOutOfShards();
  } else {
    ForeachAllGatherCopyOut(scope_, params_, result);
  }
  params_.InitUnshardedParams();
  params_.ToUnsharded();
  const EventId copy_out = scope_.Event("copy_out");
  scope_.program().Record(copy_out, kCompute);
  if (forward && !result.async_op && !single) {
    comm.KeepAllGather(
        {.unit = scope_.id(), .output = result.output, .event = copy_out, .second = result.second});
  } else {
    comm.WaitAllGatherStreamsOnEvent(copy_out);
    if (!single) scope_.program().Free(result.output, comm.all_gather_memory_stream());
  }
  if (previous) comm.Free(*previous);
}

void FsdpParamGroup::Reshard() {
  if (state_.training_state == TrainingState::kForward) {
    if (state_.settings.post_forward_ranks == 0) return;
    if (HasSmallerMesh()) return ToSmallerMesh();
  }
  params_.ToSharded();
}

void FsdpParamGroup::ReshardAfterBackward() {
  if (state_.settings.reshard_after_backward) return Reshard();
  if (state_.settings.part_after_backward && HasSmallerMesh() && params_.is_unsharded()) ToSmallerMesh();
}

bool FsdpParamGroup::HasSmallerMesh() const {
  const std::int64_t ranks = state_.settings.post_forward_ranks;
  return ranks != 0 && ranks != scope_.shard_ranks();
}

void FsdpParamGroup::ToSmallerMesh() {
  params_.ToShardedPostForward(state_.settings.post_forward_ranks);
  state_.reshard_after_forward_event = scope_.Event("reshard");
  scope_.program().Record(state_.reshard_after_forward_event, kCompute);
}

Status FsdpParamGroup::PreForward(bool recompute) {
  state_.training_state = TrainingState::kForward;
  const std::string_view reason = recompute ? "recompute" : "pre_forward";
  if (Status s = Unshard(state_.settings.unshard_async_op, reason); !s) return s;
  WaitForUnshard();
  return {};
}

void FsdpParamGroup::PostForward(bool recompute) {
  if (!recompute) {
    Reshard();
    RecordPostForward();
  }
  state_.training_state = TrainingState::kIdle;
}

// A group that runs several times in a forward is there as often.
void FsdpParamGroup::RecordPostForward() {
  std::vector<FsdpParamGroup*>& order = comm_ctx().post_forward_order();
  state_.post_forward_indices.push_back(static_cast<std::int32_t>(order.size()));
  order.push_back(this);
}

Status FsdpParamGroup::PreBackward(bool prefetch) {
  if (state_.training_state == TrainingState::kPreBackward) return {};
  scope_.program().SetReason("pre_backward");
  state_.training_state = TrainingState::kPreBackward;
  if (Status s = Unshard(state_.settings.unshard_async_op, "pre_backward"); !s) return s;
  WaitForUnshard();
  return prefetch && state_.settings.default_backward_prefetch ? BackwardPrefetch() : Status{};
}

// Implicit backward prefetch: the group before this one in the order of post-forwards.
Status FsdpParamGroup::BackwardPrefetch() {
  const std::vector<FsdpParamGroup*>& order = comm_ctx().post_forward_order();
  if (state_.post_forward_indices.empty()) return {};
  const std::int32_t target = state_.post_forward_indices.back() - 1;
  state_.post_forward_indices.pop_back();
  if (target < 0) return {};
  if (target >= std::ssize(order)) {
    return MakeInputError(
        "/fsdp2/shared_comm_contexts",
        "PyTorch fails here (IndexError): the first forward of another root has emptied the "
        "order that the backward prefetch looks into",
        scope_.Name());
  }
  if (scope_.choice().groups > 1) return PrefetchAllGroupsBefore(target);
  return order[target]->PrefetchUnshard(scope_, comm_ctx(), TrainingState::kPreBackward, "prefetch_backward");
}

// The second of several groups of a module prefetches all groups of the modules before.
Status FsdpParamGroup::PrefetchAllGroupsBefore(std::int32_t last) {
  if (scope_.unit().parameter_group != 1) return {};
  const auto modules_of = [&](std::int32_t i) -> const std::vector<ModuleId>& {
    return comm_ctx().post_forward_order()[i]->scope_.choice().modules;
  };
  std::int32_t target = last;
  while (target >= 0 && modules_of(target) == scope_.choice().modules) --target;
  const std::int32_t first = target;
  for (; target >= 0; --target) {
    if (modules_of(target) == scope_.choice().modules) continue;
    if (modules_of(target) != modules_of(first)) break;
    FsdpParamGroup& group = *comm_ctx().post_forward_order()[target];
    if (Status s =
            group.PrefetchUnshard(scope_, comm_ctx(), TrainingState::kPreBackward, "prefetch_backward");
        !s) {
      return s;
    }
  }
  return {};
}

Status FsdpParamGroup::PrefetchUnshard(const UnitScope& by, const FsdpCommContext& comm_ctx_of_by,
                                       TrainingState pass, std::string_view reason) {
  const bool gathers = scope_.shard_ranks() > 1 && !state_.all_gather_result && !params_.is_unsharded();
  if (gathers && !(state_.lazily_initialised && comm_ctx().initialised())) {
    return MakeInputError(
        "/fsdp2",
        "PyTorch fails here (AttributeError): a unit is prefetched before the first forward of "
        "its own root",
        by.Name() + " prefetches " + scope_.Name());
  }
  if (&comm_ctx_of_by != state_.comm_ctx) {
    faults_.Add(PyTorchFault::kFsdp2PrefetchedByOtherRoot);
  }
  // use_training_state
  const TrainingState before = std::exchange(state_.training_state, pass);
  const Status status = Unshard(state_.settings.unshard_async_op, reason);
  state_.training_state = before;
  return status;
}

// Gradients stay as they are: nothing of them is reduced.
Status FsdpParamGroup::CheckUnreduced() const {
  if (scope_.rules().units_that_never_ran_are_skipped) return {};
  const MixedPrecision& mixed = scope_.choice().mixed_precision;
  if (params_.has_unsharded_params() || !mixed.reduce_dtype || mixed.reduce_dtype == mixed.param_dtype) {
    return {};
  }
  return MakeInputError("/program",
                        "PyTorch fails here ('FSDPParam' object has no attribute '_unsharded_param'): it "
                        "looks for gradients that wait in the reduce dtype in a unit that has never run",
                        scope_.Name());
}

// Parameters for which the user asks for zeros, or whose sum over the shards waits for what is all-reduced
// now.
std::set<std::int32_t> FsdpParamGroup::ParametersWithZeros() const {
  if (!params_.has_unsharded_params() || !scope_.rules().partial_sums_get_zeros) return {};
  std::set<std::int32_t> parameters;
  if (state_.settings.reduce_scatter_unused_params) {
    for (const std::int32_t p : scope_.AllParameters()) {
      if (scope_.unit().parameters[p].requires_grad) parameters.insert(p);
    }
  }
  if (state_.partial_reduce_output >= 0) {
    const Buffer& partial = scope_.program().plan().buffers[state_.partial_reduce_output];
    parameters.insert(partial.parameters.begin(), partial.parameters.end());
  }
  return parameters;
}

Status FsdpParamGroup::PostBackward(std::string_view reason) {
  scope_.program().SetUnit(scope_.id());
  scope_.program().SetReason(reason);
  const bool partly_run = scope_.rules().members_enter_one_by_one && scope_.choice().modules.size() > 1 &&
                          state_.training_state == TrainingState::kForward;
  const bool entered = state_.training_state == TrainingState::kPreBackward;
  state_.training_state = TrainingState::kPostBackward;
  unsharded_grads_.AccumulateIfNeeded();
  state_.post_backward_pending = !state_.settings.reduce_grads;
  if (!state_.settings.reduce_grads) {
    if (Status s = CheckUnreduced(); !s) return s;
    ReshardAfterBackward();
    unsharded_grads_.ToAccumulatedIfNeeded();
    return {};
  }
  if (unsharded_grads_.HasTwoDTypes() && !scope_.rules().gradient_dtypes_may_differ) {
    return MakeInputError(
        "/program",
        "PyTorch fails here (FSDP reduce-scatter expects uniform gradient dtype): parameters that get their "
        "first gradient in this backward have it in another dtype than those that accumulated without sync",
        scope_.Name());
  }
  const UnshardedGrads::Taken grads =
      unsharded_grads_.Take(ParametersWithZeros(), /*zeros_are_accumulated=*/!entered);
  ReshardAfterBackward();
  const bool waits = !grads.parameters.empty() || scope_.rules().idle_units_wait;
  if (scope_.IsLastGroup() && waits) comm_ctx().WaitForReduceScatters(ReduceScatterMaxInputBuffers() - 1);
  if (grads.parameters.empty()) {
    const bool left = state_.partial_reduce_output >= 0 && state_.settings.all_reduce_grads;
    if (left) faults_.Add(PyTorchFault::kFsdp2PartialSumLeft);
    return {};
  }
  WaitForPostBackward();
  const Result<ForeachReduceResult> reduced =
      ForeachReduce({.scope = scope_,
                     .settings = state_.settings,
                     .comm_ctx = comm_ctx(),
                     .sharded_grads = sharded_grads_,
                     .faults = faults_,
                     .optimizer_in_backward = optimizer_in_backward_,
                     .partial_reduce_output = state_.partial_reduce_output},
                    grads);
  if (!reduced) return std::unexpected(reduced.error());
  comm_ctx().AddReduceScatter(reduced->reduce_scatter);
  SetPostReduceEvent(reduced->post_reduce_stream, reduced->post_reduce_event);
  state_.all_reduce_state = reduced->all_reduce;
  state_.partial_reduce_output = reduced->partial_reduce_output;
  if (partly_run) {
    scope_.program().SetReason("partly_run");
    scope_.program().Wait(state_.post_reduce_event, kCompute);
  }
  return {};
}

void FsdpParamGroup::ReducePartial(BufferId partial) {
  const ForeachReduceResult reduced = ReducePartialOutput({.scope = scope_,
                                                           .settings = state_.settings,
                                                           .comm_ctx = comm_ctx(),
                                                           .sharded_grads = sharded_grads_,
                                                           .faults = faults_,
                                                           .optimizer_in_backward = optimizer_in_backward_,
                                                           .partial_reduce_output = partial});
  SetPostReduceEvent(reduced.post_reduce_stream, reduced.post_reduce_event);
  state_.all_reduce_state = reduced.all_reduce;
}

void FsdpParamGroup::SetPostReduceEvent(StreamId stream, EventId event) {
  state_.post_reduce_event = event;
  if (scope_.rules().one_wait_a_stream) comm_ctx().SetLastPostReduceEvent(stream, event);
}

void FsdpParamGroup::WaitForPostBackward() {
  ProgramBuilder& program = scope_.program();
  if (state_.post_reduce_event >= 0) program.Wait(state_.post_reduce_event, kCompute);
  if (state_.all_reduce_state) program.Wait(state_.all_reduce_state->event, kCompute);
  DropReduced();
}

// The compute stream has waited for this group's reduction, or for a later one on the same stream.
void FsdpParamGroup::DropReduced() {
  state_.post_reduce_event = -1;
  if (!state_.all_reduce_state) return;
  scope_.program().Free(std::exchange(state_.all_reduce_state, std::nullopt)->input,
                        comm_ctx().reduce_scatter_stream());
}

Status FsdpParamGroup::FinalizeByUser() {
  if (state_.partial_reduce_output >= 0 ||
      (state_.post_backward_pending && state_.settings.reduce_grads &&
       (scope_.unit().replicate_communicator >= 0 || scope_.unit().inner_reduce_communicator >= 0) &&
       !state_.settings.all_reduce_grads)) {
    return MakeInputError("/program",
                          "PyTorch fails here: finalize_backward does not support gradients that wait for an "
                          "all-reduce",
                          scope_.Name(), "set_requires_all_reduce: true");
  }
  scope_.program().SetUnit(scope_.id());
  scope_.program().SetReason("manual");
  if (state_.post_backward_pending) {
    if (Status s = PostBackward("manual"); !s) return s;
  } else {
    ReshardAfterBackward();
  }
  SetIdle();
  return {};
}

std::size_t FsdpParamGroup::ReduceScatterMaxInputBuffers() const {
  return scope_.rules().one_cap_for_all_units ? comm_ctx().state().reduce_scatter_max_input_buffers
                                              : state_.settings.reduce_scatter_max_input_buffers;
}

void FsdpParamGroup::FinalizeBackward() {
  scope_.rules().one_wait_a_stream ? DropReduced() : WaitForPostBackward();
  sharded_grads_.WaitForOffload();
  DropUnusedAllGather();
  state_.post_forward_indices.clear();
}

void FsdpParamGroup::ResetIterState() {
  ProgramBuilder& program = scope_.program();
  DropUnusedAllGather();
  state_.all_gather_result.reset();
  WaitForPostBackward();
  if (state_.reshard_after_forward_event >= 0) {
    comm_ctx().WaitAllGatherStreamsOnEvent(std::exchange(state_.reshard_after_forward_event, -1));
  }
  sharded_grads_.Discard();
  unsharded_grads_.Discard();
  if (state_.partial_reduce_output >= 0) {
    program.Free(std::exchange(state_.partial_reduce_output, -1), comm_ctx().reduce_scatter_stream());
  }
  state_.post_backward_pending = false;
  state_.post_forward_indices.clear();
  SetIdle();
  ToSharded();
}

// Gathered for a backward that did not come.
void FsdpParamGroup::DropUnusedAllGather() {
  if (!state_.all_gather_result) return;
  const AllGatherResult result = *std::exchange(state_.all_gather_result, std::nullopt);
  if (result.event < 0) return;
  scope_.program().Wait(result.event, kCompute);
  scope_.program().Free(result.output, comm_ctx().all_gather_memory_stream());
}

}  // namespace shardplan::fsdp2
