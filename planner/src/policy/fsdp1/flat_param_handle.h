// One flat parameter: where its data and its gradient are, and how its data is unsharded and resharded
// (_flat_param.py). What happens to the gradient is in flat_param_grad.h.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "policy/fsdp1/context.h"
#include "policy/fsdp1/flat_storage.h"
#include "policy/fsdp1/post_backward_hook_state.h"

namespace shardplan::fsdp1 {

// Of a handle, not of its module.
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
  // What the tensor's data is: the shard, its copy on the device, or an unsharded buffer. -1: what it was
  // flattened into, of which an offloaded shard is a pinned copy.
  BufferId data = -1;
  FlatStorage mp_shard;  // _mp_shard: the shard in the low precision
  FlatStorage
      full_param_padded;  // _full_param_padded: what is gathered, in the low precision if there is one
  FlatStorage full_prec_full_param_padded;  // _full_prec_full_param_padded: ... in the original dtype
  FlatTensor device_shard;                  // flat_param_to(device): of an offloaded shard
  FlatTensor summoned_on_host;              // to_cpu

  std::set<std::int32_t> view_grads;  // parameters whose views have a gradient that is not in `grad` yet
  FlatTensor grad;                    // .grad, unsharded: not reduced yet
  // .grad or _saved_grad_shard: the gradient as the optimizer gets it. Set by a reduction, taken by the
  // reset after zero_grad, a step in the backward and NO_SHARD's next reduction.
  bool has_sharded_grad = false;
  bool sharded_grad_is_low_precision =
      false;                          // keep_low_precision_grads: from one backward's end to the next
  bool has_saved_grad = false;        // _saved_grad_shard exists: .grad was put aside for this backward
  bool post_backward_called = false;  // _post_backward_called: since a backward that reduced was over
  // Parameters of each contribution to the gradients that are there. The verifier compares them between
  // steps.
  std::vector<std::vector<std::int32_t>> contributions;
  FlatStorage cpu_grad;      // _cpu_grad; with a step in the backward it is made in the pre-forward
  FlatTensor device_grad;    // of an offloaded gradient, until the backward is over
  FlatTensor summoned_grad;  // unshard_grad: gathered for summon_full_params(with_grads)

  PostBackwardHookState post_backward_hook_state{false};  // _post_backward_hook_state
  // _register_post_backward_reshard_only_hook, of a frozen one: it hangs on the inputs of this call.
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
  // Whether the unsharded memory is not there. As in PyTorch, asking for that in full precision frees the low
  // precision's: what is summoned may be changed.
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
  HandleTrainingState training_state = HandleTrainingState::kIdle;  // set by hooks
  // FSDP_USE_FULL_PREC_IN_EVAL is set and the module was not in training mode in the latest forward.
  bool evaluates_in_full_precision = false;
  bool needs_pre_forward_unshard = false;    // set by the root's pre-forward, taken by the unit's
  bool needs_pre_backward_unshard = false;   // set by post_forward, taken by pre_backward
  bool prefetched = false;                   // from a prefetch to the next reshard
  std::optional<UnitCall> prefetched_views;  // the pre-forward in which the prefetch made views
  bool ran_pre_backward_hook = false;        // once a backward
  bool skipped_use_sharded_views = false;    // of the latest reshard; the final callback makes up for it
  std::optional<std::int32_t> pre_forward_order_index;  // _pre_forward_order_index; set by ExecOrderData
  std::optional<std::int32_t> post_forward_index;  // _post_forward_index; ... and taken by the final callback
  bool summoned = false;                           // inside summon_full_params
  bool frees_when_summon_ends = false;             // ... which has gathered it

  bool operator==(const FlatParamHandle&) const = default;

 private:
  bool UsesFullPrecisionParam() const { return config().casts_params && ForcesFullPrecision(); }
  // _get_padded_unsharded_flat_param
  FlatStorage& PaddedUnshardedFlatParam();
  void MakeCpuGrad();
  void UseUnshardedFlatParam(BufferId unsharded);
  void UseShardedFlatParam(bool grad_enabled);
  void FreeUnshardedFlatParam(StreamId stream);

  const Context* context_;
  UnitId id_;
};

}  // namespace shardplan::fsdp1
