// SPDX-License-Identifier: Apache-2.0
// FullyShardedDataParallel, the flat-parameter runtime.
#include <algorithm>
#include <cmath>

#include "policies/policies.h"

namespace shardplan::internal {
namespace {

bool StepsOriginalParameters(const Strategy& strategy) { return strategy.fsdp1.use_orig_params; }

// One of the two factors given changes that one alone; a communication hook has its own division.
double Fsdp1GradientDivisor(const Strategy& strategy, const Unit& unit, double ranks) {
  const Fsdp1Knobs& knobs = strategy.fsdp1;
  const bool given = knobs.gradient_predivide_factor || knobs.gradient_postdivide_factor;
  if (!given || knobs.comm_hook != Fsdp1CommHook::kNone) return ranks * unit.hook_divisor;
  double before = 1;
  while (std::fmod(ranks, before) == 0 && ranks / before > before) before *= 2;
  const double after = knobs.gradient_postdivide_factor.value_or(ranks / before);
  before = knobs.gradient_predivide_factor.value_or(before);
  return std::max(before, 1.0) * std::max(after, 1.0);
}

// Hybrid sharding takes the mesh's two dimensions; any other sharding takes all ranks as one.
std::vector<DataParallelDims> Fsdp1UnitRanks(const Strategy& strategy,
                                             const std::vector<StrategyMeshDim>& mesh) {
  std::vector<Fsdp1Sharding> shardings = {strategy.fsdp1.sharding};
  for (const UnitRule& rule : strategy.units) {
    if (rule.sharding) shardings.push_back(*rule.sharding);
  }
  const DataParallelDims given = GivenDims(strategy);
  std::vector<std::string> all_ranks = given.replicate;
  all_ranks.insert(all_ranks.end(), given.shard.begin(), given.shard.end());
  const bool one_shard = std::ranges::all_of(mesh, [&](const StrategyMeshDim& dim) {
    return dim.size == 1 || std::ranges::find(given.shard, dim.name) == given.shard.end();
  });
  std::vector<DataParallelDims> all;
  for (const Fsdp1Sharding sharding : shardings) {
    switch (sharding) {
      case Fsdp1Sharding::kFullShard:
      case Fsdp1Sharding::kShardGradOp:
        all.push_back({all_ranks, {}});
        break;
      case Fsdp1Sharding::kNoShard:
        all.push_back({{}, all_ranks});
        break;
      case Fsdp1Sharding::kHybridShard:
      case Fsdp1Sharding::kHybridShardZero2:
        // FSDP1 takes the one rank that it would shard over for all that there are.
        all.push_back(one_shard ? DataParallelDims{} : given);
        break;
    }
  }
  return all;
}

// With a wrap policy modules of some classes are units in full precision. The root is none of them.
std::vector<MixedPrecision> Fsdp1UnitPrecisions(const Strategy& strategy, const Unit& unit) {
  std::vector<MixedPrecision> all = GivenPrecisions(strategy);
  const auto is_class = [](const std::string& entry) { return entry.starts_with("class:"); };
  const bool has_policy =
      strategy.fsdp1.size_based_wrap || std::ranges::any_of(strategy.units, [&](const UnitRule& rule) {
        return std::ranges::any_of(rule.modules, is_class);
      });
  const bool ignores =
      strategy.mixed_precision && !strategy.mixed_precision->module_classes_to_ignore.empty();
  if (has_policy && ignores && !unit.fqn.empty()) all.emplace_back();
  return all;
}

std::vector<ProcedureKind> Fsdp1Procedures(const Unit& unit) {
  using enum ProcedureKind;
  std::vector<ProcedureKind> kinds = {kUnshard, kReshard};
  if (unit.param_dtype != unit.orig_dtype) {
    kinds.insert(kinds.end(), {kUnshardFullPrecision, kReshardFullPrecision});
  }
  if (!Trains(unit)) return kinds;
  kinds.push_back(kReduce);
  kinds.insert(kinds.end(), kKeepingKinds.begin(), kKeepingKinds.end());
  return kinds;
}

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

PolicyKnobs Fsdp1PolicyKnobs() {
  // The runtime reads nothing but its constructor's arguments before the first step.
  const CallForm call = {.in_setup = false};
  CallForm no_sync = call, sync = call, summon = call;
  no_sync.method = "no_sync";
  sync.method = "set_requires_gradient_sync";
  summon.method = "summon_full_params";
  summon.flags = {"with_grads", "offload_to_cpu", "rank0_only", "writeback"};
  return {.name = "fsdp1",
          .calls = {no_sync, sync, summon},
          .layout = LayoutKind::kFlat,
          .unit_ranks = Fsdp1UnitRanks,
          .unit_precisions = Fsdp1UnitPrecisions,
          .procedures = Fsdp1Procedures,
          .accumulation_call = "no_sync",
          .steps_original_parameters = StepsOriginalParameters,
          .gradient_divisor = Fsdp1GradientDivisor,
          .reshard_advice = Fsdp1ReshardAdvice,
          .memory_changes = Fsdp1MemoryChanges};
}

}  // namespace shardplan::internal
