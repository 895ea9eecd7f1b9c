// SPDX-License-Identifier: Apache-2.0
// One flat parameter: where its data and its gradient are, and how its data is unsharded and resharded
// (_flat_param.py). flat_param_grad.h has the gradient's part.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "policy/fsdp1/context.h"
#include "policy/fsdp1/flat_storage.h"
#include "policy/fsdp1/post_backward_hook_state.h"

namespace shardplan::fsdp1 {

// The state of a handle, not of its module.
enum class HandleTrainingState : std::uint8_t {
  kIdle,
  kForward,
  kBackwardPre,
  kBackwardPost,
  kSummonFullParams,
};

// Attributes of FlatParameter, the tensor. The hooks change the gradient's, FlatParamHandle the others.
struct FlatParameter {
  BufferId local_shard = -1;  // _local_shard
  // The tensor's data: the shard, its copy on the device, or an unsharded buffer. -1: the tensor that it was
  // flattened into, of which an offloaded shard is a pinned copy.
  BufferId data = -1;
  // _mp_shard: the shard in the low precision.
  FlatStorage mp_shard;
  // _full_param_padded: what is gathered, in the low precision if there is one.
  FlatStorage full_param_padded;
  // _full_prec_full_param_padded: what is gathered in the original dtype, beside a low precision.
  FlatStorage full_prec_full_param_padded;
  // Made by flat_param_to(device), of an offloaded shard. Freed when it is gathered; NO_SHARD's by the
  // reshard.
  FlatTensor device_shard;
  // Made by to_cpu, freed when its context is left.
  FlatTensor summoned_on_host;

  // Parameters whose views have a gradient that is not in `grad` yet. Set by segments of a backward, taken by
  // AccumulateGrad.
  std::set<std::int32_t> view_grads;
  // .grad, unsharded and not reduced. Set by AccumulateGrad, taken by the reduction or by ResetGrad.
  FlatTensor grad;
  // .grad or _saved_grad_shard: the gradient as the optimizer gets it. Set by the reduction, taken by
  // ResetGrad, by a step in the backward and by NO_SHARD's next reduction.
  bool has_sharded_grad = false;
  // With keep_low_precision_grads: from PrepareGradientForOptim to PrepareGradientForBackward.
  bool sharded_grad_is_low_precision = false;
  // _saved_grad_shard exists: .grad was put aside. Set by PrepareGradientForBackward, taken by
  // PrepareGradientForOptim.
  bool has_saved_grad = false;
  // _post_backward_called: set by the post-backward hook, taken by PrepareGradientForOptim.
  bool post_backward_called = false;
  // Parameters of each contribution to the gradients that are there, from AccumulateGrad to ResetGrad. The
  // verifier compares them between steps.
  std::vector<std::vector<std::int32_t>> contributions;
  // _cpu_grad. There for ever, or, with a step in the backward, from the pre-forward to that step.
  FlatStorage cpu_grad;
  // The gradient that cpu_grad is a copy of, until the backward is over.
  FlatTensor device_grad;
  // Made by UnshardGrad for summon_full_params(with_grads), freed by ReshardGrad.
  FlatTensor summoned_grad;

  // _post_backward_hook_state, and what autograd knows of the views.
  PostBackwardHookState post_backward_hook_state{false};
  // _register_post_backward_reshard_only_hook, of a frozen one: the hook is on the inputs of this call. Set
  // by the pre-forward, taken by the final callback.
  std::optional<UnitCall> reshard_only_hook;

  bool operator==(const FlatParameter&) const = default;
};

class FlatParamHandle {
 public:
  // Makes the buffers; `context` outlives the handle and has its configuration.
  FlatParamHandle(const Context& context, UnitId id);

  UnitId id() const { return id_; }
  const Context& context() const { return *context_; }
  const FlatParamConfig& config() const { return *context_->flat_params[id_]; }
  const Unit& unit() const { return context_->UnitOf(id_); }
  std::int64_t shard_numel() const { return unit().flat_numel / config().ranks; }

  // The allocations of init_flat_param_attributes, each emptied at once.
  void InitFlatParamAttributes();

  // _force_full_precision
  bool ForcesFullPrecision() const;
  // Whether the unsharded memory is not there. Asking for that in full precision frees the low precision's,
  // which PyTorch does, too: what is summoned may be changed.
  bool NeedsUnshard(const UnshardStreams& streams);
  // Brings an offloaded shard to the device and casts it. The buffer to gather, or for NO_SHARD to use: the
  // local shard if there was nothing to do. An offloaded shard is brought even when nothing is to be
  // gathered.
  BufferId PreUnshard(const UnshardStreams& streams);
  // Gathers `shard`, unless that is not needed, and makes the modules use the outcome.
  void Unshard(BufferId shard, const UnshardStreams& streams);
  // Frees the low-precision shard that was gathered.
  void PostUnshard(const UnshardStreams& streams);
  // Back to the shard; frees the unsharded memory if asked to. `streams`: that it was unsharded on.
  void Reshard(bool free_unsharded_flat_param, bool grad_enabled, const UnshardStreams& streams);
  // Frees what NO_SHARD's modules have used instead.
  void PostReshard(const UnshardStreams& streams);
  // The context manager of summon_full_params(offload_to_cpu): entered and left.
  void ToCpu();
  void FromCpu();

  // _prefetch_handle has unsharded it. `views`: the pre-forward in which that made views.
  void SetPrefetched(std::optional<UnitCall> views);
  void ClearPrefetched();

  // Whether .data is on the device although the shard is not.
  bool IsOnDevice() const { return flat_param.data >= 0 && flat_param.data != flat_param.local_shard; }
  bool PointsToShard() const { return flat_param.data == flat_param.local_shard; }

  FlatParameter flat_param;
  // _training_state. Set by the hooks and by summon_full_params.
  HandleTrainingState training_state = HandleTrainingState::kIdle;
  // FSDP_USE_FULL_PREC_IN_EVAL is set and the module was not in training mode in the latest forward.
  bool evaluates_in_full_precision = false;
  // _needs_pre_forward_unshard: set by the root's pre-forward, taken by the unit's.
  bool needs_pre_forward_unshard = false;
  // _needs_pre_backward_unshard: set by the post-forward, taken by the pre-backward hook.
  bool needs_pre_backward_unshard = false;
  // _prefetched: from a prefetch to the next reshard, forward of the root or end of a backward.
  bool prefetched = false;
  // While `prefetched`: the pre-forward in which the prefetch made views.
  std::optional<UnitCall> prefetched_views;
  // _ran_pre_backward_hook: taken by the post-forward and by the final callback.
  bool ran_pre_backward_hook = false;
  // _skipped_use_sharded_views: of the latest reshard. The final callback reshards again.
  bool skipped_use_sharded_views = false;
  // _pre_forward_order_index: set by ExecOrderData, once.
  std::optional<std::int32_t> pre_forward_order_index;
  // _post_forward_index: set by ExecOrderData, taken by the final callback.
  std::optional<std::int32_t> post_forward_index;
  // Inside of summon_full_params.
  bool summoned = false;
  // Set when that context is entered and taken when it is left: the context has gathered the parameter.
  bool frees_when_summon_ends = false;

  bool operator==(const FlatParamHandle&) const = default;

 private:
  bool UsesFullPrecisionParam() const { return config().casts_params && ForcesFullPrecision(); }
  // _get_padded_unsharded_flat_param
  FlatStorage& PaddedUnshardedFlatParam();
  void MakeCpuGrad();
  void UseUnshardedFlatParam(BufferId unsharded);
  void UseShardedFlatParam(bool grad_enabled);
  void FreeUnshardedFlatParam(const UnshardStreams& streams);

  const Context* context_;
  UnitId id_;
};

}  // namespace shardplan::fsdp1
