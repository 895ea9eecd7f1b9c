// SPDX-License-Identifier: Apache-2.0
// The strategy: which policy, which units, which knobs, which training loop
// (docs/reference/strategy-format.md).
//
// Every knob has the default that PyTorch has. A field that is nullopt means "argument not given", which is
// not always the same as any value (fully_shard's reshard_after_forward=None is True for all but the root).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/optimizer_kind.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// A release of PyTorch, by its first two numbers. Ascending.
enum class PyTorchVersion : std::uint8_t { k2_11, k2_15 };
inline constexpr PyTorchVersion kOldestPyTorch = PyTorchVersion::k2_11;
inline constexpr PyTorchVersion kNewestPyTorch = PyTorchVersion::k2_15;

// A knob of a policy that is not built in. A number that is whole is an std::int64_t, as far as that goes.
using KnobValue = std::variant<bool, std::int64_t, double, std::string>;

// FSDP2's reshard_after_forward: bool, or the size of the smaller mesh to reshard to.
using ReshardAfterForward = std::variant<bool, std::int64_t>;

// torch.distributed.fsdp.MixedPrecisionPolicy (fsdp2) / MixedPrecision (fsdp1).
struct MixedPrecision {
  std::optional<DType> param_dtype;
  std::optional<DType> reduce_dtype;
  // fsdp2 of 2.15, param_dtype_override_fn: parameters, by FQN or pattern, that keep their own dtype.
  std::vector<std::string> keep_param_dtype;
  std::optional<DType> output_dtype;        // fsdp2
  std::optional<bool> cast_forward_inputs;  // left out: true with fsdp2, false with fsdp1
  bool cast_root_forward_inputs = true;     // fsdp1: those of the root, whatever the other one says
  std::optional<DType> buffer_dtype;        // fsdp1
  bool keep_low_precision_grads = false;    // fsdp1
  // fsdp1 with a wrap policy: modules of these classes become units of their own in full precision.
  // "_BatchNorm" stands for every batch norm.
  std::vector<std::string> module_classes_to_ignore = {"_BatchNorm"};
  bool operator==(const MixedPrecision&) const = default;
};

enum class Fsdp1Sharding : std::uint8_t {
  kFullShard,
  kShardGradOp,
  kNoShard,
  kHybridShard,
  kHybridShardZero2
};
enum class Fsdp1BackwardPrefetch : std::uint8_t { kNone, kPre, kPost };

// The dimensions of the mesh that make up FSDP's own two (a dimension may be flattened from several:
// torch's DataParallelMeshDims, or DeviceMesh._flatten).
struct DataParallelDims {
  std::vector<std::string> shard;
  std::vector<std::string> replicate;
  bool operator==(const DataParallelDims&) const = default;
};

// ShardPlacementResult of shard_placement_fn: the parameters whose FQNs match are on a mesh of their own. The
// first rule that matches counts.
struct ParameterMeshRule {
  std::vector<std::string> parameters;  // patterns as in UnitRule::modules, without "class:"
  DataParallelDims data_parallel;
  // Apart from the rest of the unit, which PyTorch has no call for; none: as the unit's.
  std::optional<ReshardAfterForward> reshard_after_forward;
  bool operator==(const ParameterMeshRule&) const = default;
};

// One call of fully_shard / one FSDP wrap: the modules of one unit, or a rule that makes many.
// `modules` entries: an FQN ("layers.0"), "" (the root), a pattern with '*' and '?' over FQNs ("layers.*",
// where '*' does not cross a '.'), or "class:NAME" (every module of that class). A single entry that is an
// FQN list means one unit of several modules (fully_shard([a, b])) when `group` is true; otherwise each match
// is a unit of its own.
struct UnitRule {
  std::vector<std::string> modules;
  bool group = false;
  std::optional<ReshardAfterForward> reshard_after_forward;
  std::optional<MixedPrecision> mixed_precision;
  std::optional<bool> cpu_offload;
  std::optional<DataParallelDims> data_parallel;    // fsdp2: the call's own mesh, say of experts
  std::vector<ParameterMeshRule> parameter_meshes;  // fsdp2: those of some of its parameters
  // fsdp1: what a CustomPolicy's dictionary overrides for these modules.
  std::optional<Fsdp1Sharding> sharding;
  std::optional<Fsdp1BackwardPrefetch> backward_prefetch;
  std::optional<bool> forward_prefetch;
  bool operator==(const UnitRule&) const = default;
};

// set_modules_to_forward_prefetch / set_modules_to_backward_prefetch: the units that `unit` prefetches, in
// order.
struct PrefetchList {
  std::string unit;
  std::vector<std::string> prefetch;
  bool operator==(const PrefetchList&) const = default;
};

// How FSDP2 and its custom reductions reduce.
enum class ReduceOp : std::uint8_t { kSum, kAverage };

// shard_placement_fn: Shard(dim) for the parameters whose FQNs match (patterns as in UnitRule::modules,
// without "class:"). The first rule that matches counts; dim may be negative.
struct ShardDimRule {
  std::vector<std::string> parameters;
  std::int32_t dim = 0;
  bool operator==(const ShardDimRule&) const = default;
};

// A tensor that an all-gather extension makes of a parameter: one element for every `per_elements` elements
// (rounded up), or `numel` elements whatever the parameter's size.
struct ExtensionTensor {
  DType dtype = DType::kUInt8;
  std::int64_t per_elements = 1;
  std::optional<std::int64_t> numel;
  bool operator==(const ExtensionTensor&) const = default;
};

// fsdp_pre_all_gather / fsdp_post_all_gather of the parameters whose FQNs match. `gathered` goes into the
// all-gather in place of the shard (sizes of one rank's padded shard). `unsharded` is what post-all-gather
// allocates beside the gathered tensors (sizes of the unsharded parameter) and FSDP frees when it reshards.
struct ExtensionRule {
  std::vector<std::string> parameters;
  std::vector<ExtensionTensor> gathered;
  std::vector<ExtensionTensor> unsharded;
  bool operator==(const ExtensionRule&) const = default;
};

// set_all_reduce_hook for the units that match (patterns as UnitRule::modules; empty: all units). The hook
// all-reduces the reduced gradients over `mesh_dim` ("": it does not), then divides them by `divide`.
struct AllReduceHook {
  std::vector<std::string> modules;
  std::string mesh_dim;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::optional<double> divide;
  bool own_stream = false;  // stream=: not the all-reduce stream; PyTorch takes it without HSDP only
  bool operator==(const AllReduceHook&) const = default;
};

struct Fsdp2Knobs {
  // The next/previous `n` units, as torchtitan sets them with explicit lists. 0: none (forward default);
  // -1: PyTorch's implicit backward prefetch of one.
  std::int32_t forward_prefetch = 0;
  std::int32_t backward_prefetch = -1;
  std::vector<PrefetchList> forward_prefetch_lists;
  std::vector<PrefetchList> backward_prefetch_lists;
  bool unshard_async_op = false;
  std::optional<double> gradient_divide_factor;
  bool force_sum_reduction = false;
  std::vector<ShardDimRule> shard_dims;
  std::vector<ExtensionRule> extensions;
  std::vector<AllReduceHook> all_reduce_hooks;
  bool separate_reduce_scatter_communicator = false;  // set_separate_reduce_scatter_group
  std::int32_t reduce_scatter_inputs_in_flight = 1;   // set_reduce_scatter_max_input_buffers
  bool allocate_memory_from_process_group = false;    // set_allocate_memory_from_process_group_for_comm
  bool post_optim_event = false;                      // set_post_optim_event after every optimizer step
  // Not in PyTorch: set_reshard_after_backward(False) leaves a unit that is kept on a smaller mesh after the
  // forward there after the backward, too, and not whole.
  bool part_after_backward = false;
  // Not in PyTorch. Gradients are reduced over so many neighbouring ranks of the shards first, then over the
  // ranks that have the same place in theirs. set_requires_all_reduce(False) leaves the second (and the
  // all-reduce over replicas) to a later micro-batch. 0: over all shards at once.
  std::int64_t inner_reduce_ranks = 0;
  // False: fully_shard is not called on the root; each outermost unit is a root of its own.
  bool shard_root = true;
  std::vector<std::vector<std::string>> shared_comm_contexts;  // share_comm_ctx: FQNs of roots
  bool operator==(const Fsdp2Knobs&) const = default;
};

// A hook of torch.distributed.algorithms._comm_hooks.default_hooks that reduces gradients instead of the
// runtime.
enum class Fsdp1CommHook : std::uint8_t { kNone, kAllReduce, kReduceScatter, kFp16Compress, kBf16Compress };

// size_based_auto_wrap_policy. Classes by name.
struct SizeBasedWrap {
  std::int64_t min_num_params = 100'000'000;
  std::vector<std::string> force_leaf_modules = {"MultiheadAttention"};  // nothing below them is wrapped
  std::vector<std::string> exclude_wrap_modules = {"ModuleList", "ModuleDict"};
  bool operator==(const SizeBasedWrap&) const = default;
};

struct Fsdp1Knobs {
  Fsdp1Sharding sharding = Fsdp1Sharding::kFullShard;
  Fsdp1BackwardPrefetch backward_prefetch = Fsdp1BackwardPrefetch::kPre;
  bool forward_prefetch = false;
  bool limit_all_gathers = true;
  bool use_orig_params = false;
  bool full_precision_in_eval = false;           // environment variable FSDP_USE_FULL_PREC_IN_EVAL=1
  bool validate_execution_order = false;         // what TORCH_DISTRIBUTED_DEBUG=DETAIL adds
  std::optional<SizeBasedWrap> size_based_wrap;  // units beside those of Strategy::units
  std::vector<std::string> ignored_modules;      // entries as UnitRule::modules
  Fsdp1CommHook comm_hook = Fsdp1CommHook::kNone;
  // Not given: a power of two near the square root of the data-parallel ranks, and what is left of them.
  std::optional<double> gradient_predivide_factor, gradient_postdivide_factor;
  bool operator==(const Fsdp1Knobs&) const = default;
};

// An operator whose results a checkpointed module keeps (selective checkpointing): it is not run again.
struct SavedOperator {
  std::string name;                  // "aten.mm"
  std::int64_t recompute_every = 0;  // every so many-th of a module's is run again all the same; 0: none
  bool operator==(const SavedOperator&) const = default;
};

// Activation checkpointing applied to the trace: every module that a rule matches (as UnitRule::modules) is
// recomputed in the backward, or of them every `every`-th, in the module tree's order (torchtitan's selective
// checkpointing by layer). early_stop: recomputation ends with the last saved tensor (non-reentrant default).
struct CheckpointRule {
  std::vector<std::string> modules;
  bool early_stop = true;
  std::int64_t every = 1;
  std::vector<SavedOperator> save;
  bool operator==(const CheckpointRule&) const = default;
};

// Activations in host memory between forward and backward (torch.autograd.graph.saved_tensors_hooks, with a
// stream for each direction). Modules that are matched (as UnitRule::modules) are units' or in units; of
// these units, in the order of their forwards, every `every`-th is offloaded. Offloaded are tensors of at
// least `min_bytes` that were made in such a module's forward and that autograd alone holds when it ends.
struct ActivationOffload {
  std::vector<std::string> modules;
  std::int64_t every = 1;
  Bytes min_bytes{1 << 20};
  bool operator==(const ActivationOffload&) const = default;
};

// The arguments of torch.optim that decide what it allocates. Numbers (lr, betas, dampening) change nothing.
// The place where a matrix optimizer has a whole matrix (ComputeLayout of torchtitan's flex_shard).
enum class MatrixCompute : std::uint8_t {
  kSharded,     // nowhere: torch.optim.Muon on DTensors, which redistribute for each product
  kOwned,       // on one rank, its owner (Owned; with block_rows, BlockShard)
  kReplicated,  // on every rank of those that shard it, each of which computes it
};

std::string_view Name(MatrixCompute compute);

// The owners of the matrices whose FQNs match. No two rules match one.
struct MatrixRule {
  std::vector<std::string> parameters;  // patterns as in UnitRule::modules, without "class:"; empty: the rest
  MatrixCompute compute = MatrixCompute::kOwned;
  // owned: also over the replicas of HSDP, so that each matrix is computed once; else once in each replica.
  bool over_replicas = false;
  // Owned or replicated: every so many rows are a matrix of their own (BlockShard(0, rows)). 0: the whole
  // parameter is one.
  // A parameter of three dimensions is a batch of matrices without it.
  std::int64_t block_rows = 0;
  std::optional<std::int32_t> owner;  // of every one of them; none: the least loaded rank
  bool operator==(const MatrixRule&) const = default;
};

// torch.optim.Muon for some parameters; Optimizer::kind steps the rest.
struct Muon {
  std::vector<std::string> matrices;  // patterns as in MatrixRule; empty: see MuonMatrices in muon.h
  bool nesterov = true;
  std::int32_t ns_steps = 5;        // Newton-Schulz iterations
  std::vector<MatrixRule> compute;  // matrices that none matches: sharded
  // Patterns of the matrices that are exchanged together, in order. Matrices that none matches are the last
  // one.
  std::vector<std::vector<std::string>> buckets;
  // Exchanges as torchtitan 0.3.0's DistMuon has them: in the parameters' dtype, and momentum and parameters
  // are updated on the stream of the exchanges. Else they are in bfloat16, in which iterations begin and end,
  // and updates are on the compute stream.
  bool dist_muon = false;
  // Matrices that have owners go there in the backward, as soon as the last of an exchange's gradients is
  // reduced. Nothing may change gradients between the backward and the optimizer's step then, as clipping
  // does.
  bool begin_in_backward = false;
  bool operator==(const Muon&) const = default;
};

enum class OptimizerImplementation : std::uint8_t { kForLoop, kForeach, kFused };
struct Optimizer {
  OptimizerKind kind = OptimizerKind::kAdamW;
  std::optional<OptimizerImplementation> implementation;  // none: PyTorch's default
  bool momentum = false;                                  // sgd
  bool nesterov = false;                                  // sgd
  bool weight_decay = false;                              // sgd, adam: added to the gradients
  bool amsgrad = false;                                   // adam, adamw
  bool capturable = false;                                // adam, adamw: step counts on the device
  bool maximize = false;
  // One optimiser per parameter that steps as soon as its gradient is there, and drops the gradient:
  // torch.distributed.optim._apply_optimizer_in_backward (fsdp1), a post-accumulate-grad hook (fsdp2).
  bool in_backward = false;
  std::optional<Muon> muon;
  bool operator==(const Optimizer&) const = default;
};

// ---- the training loop of a step ----
struct ForwardCall {
  std::int32_t microbatch = 0;
  std::int32_t trace = 0;  // index into Trace::forwards
  // Whether the modules are in training mode (Module.train(), .eval()). Not given: as gradients are enabled.
  std::optional<bool> training;
  bool operator==(const ForwardCall&) const = default;
};
struct BackwardCall {
  std::vector<std::int32_t> microbatches = {0};
  std::int32_t trace = 0;  // index into Trace::backwards
  bool operator==(const BackwardCall&) const = default;
};
struct OptimizerStepCall {
  bool operator==(const OptimizerStepCall&) const = default;
};
struct ZeroGradCall {
  bool operator==(const ZeroGradCall&) const = default;
};
// A setter or user call on a module: method is PyTorch's name ("set_requires_gradient_sync", "unshard",
// "reshard"...).
struct ModuleCall {
  std::string method;
  std::string module;  // FQN
  std::optional<bool> value;
  bool recurse = true;
  std::optional<double> number;      // of a setter that takes one: set_gradient_divide_factor
  std::vector<std::string> modules;  // of one that takes modules: set_modules_to_forward_prefetch
  std::vector<std::string> flags;    // further arguments of the method that are not at their default
  bool operator==(const ModuleCall&) const = default;
};
using ProgramCall = std::variant<ForwardCall, BackwardCall, OptimizerStepCall, ZeroGradCall, ModuleCall>;
using StepProgram = std::vector<ProgramCall>;

struct StrategyMeshDim {
  std::string name;  // "shard", "replicate", or any other: "tensor", "expert", "dp_shard"
  std::int64_t size = 1;
  bool operator==(const StrategyMeshDim&) const = default;
};

struct Strategy {
  std::string policy = "fsdp2";  // "fsdp2", "fsdp1", or the name of one that is not built in
  // The release of PyTorch whose FSDP the policy is. Not given: pytorch_rules.h says which. A plan's strategy
  // has one.
  std::optional<PyTorchVersion> pytorch;
  // Outermost first, the last dimension's ranks are adjacent: {replicate, shard}. Empty: {shard: cluster's
  // ranks}.
  std::vector<StrategyMeshDim> mesh;
  // Which of its dimensions FSDP shards and replicates over, for units that give none. Not given: "shard"
  // and "replicate".
  std::optional<DataParallelDims> data_parallel;
  std::vector<UnitRule>
      units;  // in call order; the root's rule last. Empty: one unit per block class + the root
  std::optional<MixedPrecision> mixed_precision;             // for units that give none
  std::optional<ReshardAfterForward> reshard_after_forward;  // for units that give none
  bool cpu_offload = false;
  bool pin_memory = true;
  std::vector<std::string> ignored_parameters;  // FQNs
  Fsdp2Knobs fsdp2;
  Fsdp1Knobs fsdp1;
  // By name, of a policy that is not built in. Its library says which there are; a plan's strategy has all of
  // them.
  std::map<std::string, KnobValue> policy_knobs;
  std::optional<CheckpointRule> checkpoint;
  std::optional<ActivationOffload> activation_offload;
  bool compile = false;  // elementwise operators are fused as torch.compile does
  // Settings of the caching allocator as PYTORCH_CUDA_ALLOC_CONF has them; "": LibTorch's defaults. They
  // decide what is reserved, and nothing of the plan.
  std::string alloc_conf;
  Optimizer optimizer;
  std::vector<ModuleCall> setup;  // calls before the first step
  // The steps as run; the last one repeats for ever. Empty: forward 0, backward [0], optimizer_step,
  // zero_grad.
  std::vector<StepProgram> program;
  bool operator==(const Strategy&) const = default;
};

}  // namespace shardplan
