// SPDX-License-Identifier: Apache-2.0
#include "tests/planner/random_cases.h"

#include <string>
#include <utility>
#include <vector>

namespace shardplan::testing {
namespace {

TreeModule RandomTree(Random& random, const std::string& name, int depth, bool may_freeze) {
  TreeModule module{.name = name};
  const int parameters = depth == 0 ? 1 + random.Below(3) : random.Below(2);
  for (int p = 0; p < parameters; ++p) {
    module.parameters.push_back({1 + random.Below(9), 1 + random.Below(4)});
  }
  module.trainable = !may_freeze || !random.Chance(25);
  const int children = depth == 0 ? 0 : 1 + random.Below(3);
  for (int c = 0; c < children; ++c) {
    module.children.push_back(
        RandomTree(random, std::string(1, static_cast<char>('a' + c)), depth - 1, may_freeze));
  }
  return module;
}

// Inner modules first, each with a chance to become a unit.
void AddUnits(Random& random, const Trace& trace, Strategy& strategy) {
  for (auto module = trace.modules.rbegin(); module != trace.modules.rend(); ++module) {
    if (module->fqn.empty() || !random.Chance(40)) continue;
    UnitRule rule{.modules = {module->fqn}};
    if (strategy.policy == "fsdp2" && random.Chance(20)) rule.reshard_after_forward = random.Chance(50);
    strategy.units.push_back(std::move(rule));
  }
  strategy.units.push_back({.modules = {""}});
}

// Offloads activations of some units that are not recomputed. Seeds give otherwise what they gave before
// there was this.
void AddActivationOffload(std::uint32_t seed, bool may_freeze, Strategy& strategy) {
  Random random(seed * 69069U + 5);
  if (may_freeze || !random.Chance(35)) return;
  ActivationOffload rule{.modules = {}, .every = 1 + random.Below(2), .min_bytes = {0}};
  for (const UnitRule& unit : strategy.units) {
    const std::string& fqn = unit.modules.front();
    const bool recomputed = strategy.checkpoint && (fqn == "a" || fqn.starts_with("a."));
    if (!fqn.empty() && !recomputed && random.Chance(60)) rule.modules.push_back(fqn);
  }
  if (!rule.modules.empty()) strategy.activation_offload = std::move(rule);
}

// Gives some matrices owners, in up to three buckets. Seeds give otherwise what they gave before there was
// this.
void AddOwnersOfMatrices(std::uint32_t seed, RandomPlanCase& c) {
  Random random(seed * 1664525U + 9);
  if (c.strategy.policy != "fsdp2" || c.strategy.cpu_offload || !random.Chance(40)) return;
  Muon muon{.compute = {{.over_replicas = random.Chance(50)}}};
  muon.dist_muon = random.Chance(20);
  muon.begin_in_backward = !muon.dist_muon && random.Chance(60);
  std::vector<std::vector<std::string>> buckets(1 + random.Below(3));
  for (const Parameter& parameter : c.trace.parameters) {
    if (!parameter.requires_grad || random.Chance(20)) continue;
    muon.matrices.push_back(parameter.fqn);
    buckets[random.Below(static_cast<int>(buckets.size()))].push_back(parameter.fqn);
  }
  if (muon.matrices.empty()) return;
  std::erase_if(buckets, [](const std::vector<std::string>& bucket) { return bucket.empty(); });
  if (random.Chance(30)) buckets.pop_back();  // these come last, together
  muon.buckets = std::move(buckets);
  AddMuon(c.trace, {});
  c.strategy.optimizer.muon = std::move(muon);
}

}  // namespace

RandomPlanCase RandomCase(std::uint32_t seed, bool may_freeze) {
  Random random(seed);
  RandomPlanCase c;
  c.trace = TraceOf(RandomTree(random, "", 1 + random.Below(3), may_freeze));
  Strategy& s = c.strategy;
  s.policy = random.Chance(50) ? "fsdp2" : "fsdp1";
  AddUnits(random, c.trace, s);
  if (random.Chance(40)) {
    s.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
    if (random.Chance(50)) s.mixed_precision->reduce_dtype = DType::kFloat32;
  }
  if (random.Chance(30)) s.mesh = {{"replicate", 2}, {"shard", 2}};
  if (random.Chance(10)) s.mesh = {{"shard", c.ranks = 1}};
  if (random.Chance(20)) s.reshard_after_forward = std::int64_t{2};
  if (c.ranks == 1) s.reshard_after_forward.reset();
  s.pin_memory = random.Chance(70);
  s.fsdp2.forward_prefetch = random.Below(3);
  s.fsdp2.backward_prefetch = random.Below(4) - 1;
  s.fsdp1.forward_prefetch = random.Chance(30);
  s.fsdp1.backward_prefetch = static_cast<Fsdp1BackwardPrefetch>(random.Below(3));
  s.fsdp1.limit_all_gathers = random.Chance(70);
  s.fsdp1.use_orig_params = may_freeze || random.Chance(30);
  s.fsdp1.sharding = s.mesh.size() == 2  ? (random.Chance(50) ? Fsdp1Sharding::kHybridShard
                                                              : Fsdp1Sharding::kHybridShardZero2)
                     : random.Chance(60) ? Fsdp1Sharding::kFullShard
                     : random.Chance(70) ? Fsdp1Sharding::kShardGradOp
                                         : Fsdp1Sharding::kNoShard;
  s.optimizer.kind = static_cast<OptimizerKind>(1 + random.Below(4));
  if (random.Chance(40)) {  // accumulation, with or without synchronisation
    const bool sync = random.Chance(30);
    const ModuleCall off{.method = "set_requires_gradient_sync", .value = sync};
    const ModuleCall on{.method = "set_requires_gradient_sync", .value = true};
    s.program = {{off, ForwardCall{0, 0}, BackwardCall{{0}, 0}, on, ForwardCall{1, 0}, BackwardCall{{1}, 0},
                  OptimizerStepCall{}, ZeroGradCall{}}};
  }
  if (random.Chance(30)) s.checkpoint = CheckpointRule{.modules = {"a"}, .early_stop = random.Chance(70)};
  AddActivationOffload(seed, may_freeze, s);
  s.cpu_offload = s.policy == "fsdp2" && random.Chance(20);  // fsdp1 adds to no gradient that is offloaded
  AddOwnersOfMatrices(seed, c);
  return c;
}

}  // namespace shardplan::testing
