// SPDX-License-Identifier: Apache-2.0
#include "shardplan/planner/fsdp2_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan {
namespace {

void LeaveOutKnobs(Strategy& strategy, std::vector<LeftOut>& left_out) {
  Fsdp2Knobs& knobs = strategy.fsdp2;
  const auto leave = [&](const char* field, std::string what) {
    left_out.push_back({fmt::format("/strategy/fsdp2/{}", field), std::move(what)});
  };
  if (knobs.backward_prefetch == 0) {
    leave("backward_prefetch", "no prefetch in the backward; FSDP2 prefetches one unit");
    knobs.backward_prefetch = -1;
  }
  if (knobs.part_after_backward) {
    leave("part_after_backward",
          "units stay on their smaller mesh between micro-batches; FSDP2 keeps them whole");
    knobs.part_after_backward = false;
  }
  if (knobs.inner_reduce_ranks > 1) {
    leave("inner_reduce_ranks", "reductions in two levels; FSDP2 reduces over all shards at once");
    knobs.inner_reduce_ranks = 0;
  }
  if (strategy.activation_offload) {
    left_out.push_back(
        {"/strategy/activation_offload",
         "activations in host memory between forward and backward; FSDP2 leaves them where they are"});
    strategy.activation_offload.reset();
  }
  if (strategy.pytorch.value_or(kNewestPyTorch) != PyTorchVersion::k2_11) return;
  if (knobs.separate_reduce_scatter_communicator) {
    leave("separate_reduce_scatter_communicator",
          "a communicator of their own for reduce-scatters; 2.11 has one for both");
    knobs.separate_reduce_scatter_communicator = false;
  }
  if (knobs.reduce_scatter_inputs_in_flight != 1) {
    leave("reduce_scatter_inputs_in_flight",
          fmt::format("{} inputs of reduce-scatters in flight; 2.11 has one",
                      knobs.reduce_scatter_inputs_in_flight));
    knobs.reduce_scatter_inputs_in_flight = 1;
  }
}

void LeaveOutOwners(Strategy& strategy, std::vector<LeftOut>& left_out) {
  std::optional<Muon>& muon = strategy.optimizer.muon;
  if (!muon || muon->compute.empty()) return;
  left_out.push_back(
      {"/strategy/optimizer/muon/compute",
       "ranks that have matrices whole; torch.optim.Muon steps DTensors. sp.Muon(model, plan=...) "
       "steps FSDP2's parameters as the plan has it"});
  *muon = {.matrices = muon->matrices, .nesterov = muon->nesterov, .ns_steps = muon->ns_steps};
}

Result<Fsdp2Settings> OfFsdp1(const Plan& plan) {
  const Fsdp1Knobs& knobs = plan.strategy.fsdp1;
  if (knobs.sharding == Fsdp1Sharding::kNoShard) {
    return MakeError(
        ErrorCode::kNegative,
        "the plan does not shard (/strategy/fsdp1/sharding: no_shard), and fully_shard always does");
  }
  Fsdp2Settings settings{.strategy = plan.strategy};
  Strategy& strategy = settings.strategy;
  settings.left_out.push_back(
      {"/strategy/policy",
       "FSDP1's runtime: flat parameters, its own prefetches and rate limiter; FSDP2's has "
       "the same units, dtypes and sharding"});
  strategy.policy = "fsdp2";
  strategy.fsdp1 = {};
  strategy.units = UnitRulesOf(plan.units);
  const bool kept =
      knobs.sharding == Fsdp1Sharding::kShardGradOp || knobs.sharding == Fsdp1Sharding::kHybridShardZero2;
  strategy.reshard_after_forward.reset();
  if (kept) strategy.reshard_after_forward = false;
  if (strategy.mixed_precision) {
    const MixedPrecision& given = *strategy.mixed_precision;
    strategy.mixed_precision =
        MixedPrecision{.param_dtype = given.param_dtype,
                       .reduce_dtype = given.reduce_dtype ? given.reduce_dtype : given.param_dtype};
  }
  if (strategy.activation_offload) {
    settings.left_out.push_back(
        {"/strategy/activation_offload", "activations in host memory between forward and backward"});
    strategy.activation_offload.reset();
  }
  if (knobs.comm_hook != Fsdp1CommHook::kNone)
    settings.left_out.push_back({"/strategy/fsdp1/comm_hook", "a hook in the place of the reductions"});
  return settings;
}

}  // namespace

std::vector<UnitRule> UnitRulesOf(const std::vector<Unit>& units) {
  std::vector<UnitRule> rules;
  for (const Unit& unit : units) {
    if (unit.modules == std::vector<std::string>{""} || unit.parameter_group > 0) continue;
    rules.push_back({.modules = unit.modules, .group = unit.modules.size() > 1});
  }
  rules.push_back({.modules = {""}});
  return rules;
}

Fsdp2Settings WithoutWhatFsdp2Lacks(Strategy strategy) {
  Fsdp2Settings settings{.strategy = std::move(strategy)};
  LeaveOutKnobs(settings.strategy, settings.left_out);
  LeaveOutOwners(settings.strategy, settings.left_out);
  return settings;
}

Result<Fsdp2Settings> Fsdp2SettingsOf(const Plan& plan) {
  if (plan.policy == "fsdp1") return OfFsdp1(plan);
  Fsdp2Settings settings = WithoutWhatFsdp2Lacks(plan.strategy);
  // torch.optim.Muon refuses batches of matrices: they are the other optimizer's.
  if (settings.strategy.optimizer.muon && settings.strategy.optimizer.muon->compute.empty()) {
    std::set<std::string> batches;
    for (const Unit& unit : plan.units) {
      for (const UnitParameter& parameter : unit.parameters) {
        if (parameter.shape.size() == 3) batches.insert(parameter.fqn);
      }
    }
    std::erase_if(settings.strategy.optimizer.muon->matrices,
                  [&](const std::string& fqn) { return batches.contains(fqn); });
  }
  return settings;
}

}  // namespace shardplan
