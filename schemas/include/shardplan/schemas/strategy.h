// The strategy: which policy, which units, which knobs, which training loop (docs/strategy-format.md).
//
// Every knob has the default that PyTorch has. A field that is nullopt means "argument not given", which is
// not always the same as any value (fully_shard's reshard_after_forward=None is True for all but the root).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/schemas/dtype.h"

namespace shardplan {

// FSDP2's reshard_after_forward: bool, or the size of the smaller mesh to reshard to.
using ReshardAfterForward = std::variant<bool, std::int64_t>;

// torch.distributed.fsdp.MixedPrecisionPolicy (fsdp2) / MixedPrecision (fsdp1).
struct MixedPrecision {
  std::optional<DType> param_dtype;
  std::optional<DType> reduce_dtype;
  std::optional<DType> output_dtype;  // fsdp2
  bool cast_forward_inputs = true;
  std::optional<DType> buffer_dtype;      // fsdp1
  bool keep_low_precision_grads = false;  // fsdp1
  bool operator==(const MixedPrecision&) const = default;
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
  bool operator==(const UnitRule&) const = default;
};

// set_modules_to_forward_prefetch / set_modules_to_backward_prefetch: the units that `unit` prefetches, in
// order.
struct PrefetchList {
  std::string unit;
  std::vector<std::string> prefetch;
  bool operator==(const PrefetchList&) const = default;
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
  bool operator==(const Fsdp2Knobs&) const = default;
};

enum class Fsdp1Sharding : std::uint8_t {
  kFullShard,
  kShardGradOp,
  kNoShard,
  kHybridShard,
  kHybridShardZero2
};
enum class Fsdp1BackwardPrefetch : std::uint8_t { kNone, kPre, kPost };

struct Fsdp1Knobs {
  Fsdp1Sharding sharding = Fsdp1Sharding::kFullShard;
  Fsdp1BackwardPrefetch backward_prefetch = Fsdp1BackwardPrefetch::kPre;
  bool forward_prefetch = false;
  bool limit_all_gathers = true;
  bool use_orig_params = false;
  bool operator==(const Fsdp1Knobs&) const = default;
};

// Activation checkpointing applied to the trace: every module that a rule matches (as UnitRule::modules) is
// recomputed in the backward. early_stop: recomputation ends with the last saved tensor (non-reentrant
// default).
struct CheckpointRule {
  std::vector<std::string> modules;
  bool early_stop = true;
  bool operator==(const CheckpointRule&) const = default;
};

enum class OptimizerKind : std::uint8_t { kNone, kSgd, kAdamW };
enum class OptimizerImplementation : std::uint8_t { kForLoop, kForeach, kFused };
struct Optimizer {
  OptimizerKind kind = OptimizerKind::kAdamW;
  OptimizerImplementation implementation = OptimizerImplementation::kForeach;
  bool momentum = false;  // sgd
  bool operator==(const Optimizer&) const = default;
};

// ---- the training loop of a step ----
struct ForwardCall {
  std::int32_t microbatch = 0;
  std::int32_t trace = 0;  // index into Trace::forwards
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
  bool operator==(const ModuleCall&) const = default;
};
using ProgramCall = std::variant<ForwardCall, BackwardCall, OptimizerStepCall, ZeroGradCall, ModuleCall>;
using StepProgram = std::vector<ProgramCall>;

struct StrategyMeshDim {
  std::string name;  // "shard", "replicate"
  std::int64_t size = 1;
  bool operator==(const StrategyMeshDim&) const = default;
};

struct Strategy {
  std::string policy = "fsdp2";  // "fsdp2", "fsdp1"
  // Outermost first, the last dimension's ranks are adjacent: {replicate, shard}. Empty: {shard: cluster's
  // ranks}.
  std::vector<StrategyMeshDim> mesh;
  std::vector<UnitRule>
      units;  // in call order; the root's rule last. Empty: one unit per block class + the root
  std::optional<MixedPrecision> mixed_precision;             // for units that give none
  std::optional<ReshardAfterForward> reshard_after_forward;  // for units that give none
  bool cpu_offload = false;
  bool pin_memory = true;
  std::vector<std::string> ignored_parameters;  // FQNs
  Fsdp2Knobs fsdp2;
  Fsdp1Knobs fsdp1;
  std::optional<CheckpointRule> checkpoint;
  Optimizer optimizer;
  std::vector<ModuleCall> setup;  // calls before the first step
  // The steps as run; the last one repeats for ever. Empty: forward 0, backward [0], optimizer_step,
  // zero_grad.
  std::vector<StepProgram> program;
  bool operator==(const Strategy&) const = default;
};

}  // namespace shardplan
