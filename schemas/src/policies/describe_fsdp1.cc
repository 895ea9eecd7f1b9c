// FullyShardedDataParallel, the flat-parameter runtime.
#include "policies/policy_descriptions.h"

namespace shardplan::internal {
namespace {

bool StepsOriginalParameters(const Strategy& strategy) { return strategy.fsdp1.use_orig_params; }

std::string Fsdp1ReshardAdvice(const Strategy& strategy, const std::string& unit, bool is_root) {
  if (is_root) return "units of their own for the modules of " + unit;
  switch (strategy.fsdp1.sharding) {
    case Fsdp1Sharding::kShardGradOp:
    case Fsdp1Sharding::kHybridShardZero2:
    case Fsdp1Sharding::kNoShard:
      return "sharding: full_shard";
    case Fsdp1Sharding::kFullShard:
    case Fsdp1Sharding::kHybridShard:
      break;
  }
  return "no prefetch, forward or backward";
}

std::vector<KnobChange> Fsdp1MemoryChanges(const Strategy& strategy) {
  Strategy full = strategy;
  full.fsdp1.sharding = Fsdp1Sharding::kFullShard;
  Strategy no_prefetch = strategy;
  no_prefetch.fsdp1.backward_prefetch = Fsdp1BackwardPrefetch::kNone;
  no_prefetch.fsdp1.forward_prefetch = false;
  Strategy limited = strategy;
  limited.fsdp1.limit_all_gathers = true;
  return {{"sharding: full_shard", full},
          {"no prefetch, forward or backward", no_prefetch},
          {"limit_all_gathers: true", limited}};
}

}  // namespace

PolicyDescription DescribeFsdp1() {
  return {.name = "fsdp1",
          .accumulation_call = "no_sync",
          .steps_original_parameters = StepsOriginalParameters,
          .reshard_advice = Fsdp1ReshardAdvice,
          .memory_changes = Fsdp1MemoryChanges};
}

}  // namespace shardplan::internal
