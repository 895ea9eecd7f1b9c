#include "policy/fsdp1/known_faults.h"

#include <algorithm>
#include <optional>
#include <variant>

namespace shardplan::fsdp1 {

std::vector<KnownFault> KnownFaults(const Context& context) {
  std::vector<KnownFault> faults;
  const auto tell = [&](bool happens, const std::vector<Rule>& rules, const char* why) {
    if (!happens) return;
    for (const Rule rule : rules) faults.push_back({rule, why});
  };
  const auto offload = [](const std::optional<FlatParamConfig>& config) {
    return config && config->offloads;
  };
  const bool offloads = std::ranges::any_of(context.flat_params, offload);
  tell(offloads, {Rule::kGradNotReduced, Rule::kSteadyState},
       "FSDP1 does not add to a gradient that it has offloaded: only no_sync() accumulates");
  tell(offloads, {Rule::kWriteRace},
       "FSDP1 does not wait for the copy of an offloaded parameter before the optimizer changes it: a "
       "backward does, an evaluation does not");
  const auto shards_over_one_of_several = [](const UnitChoice& choice) {
    return choice.unit.shard_communicator < 0 && choice.shard_size == 1 && choice.replicate_size > 1 &&
           choice.sharding != Fsdp1Sharding::kNoShard;
  };
  tell(std::ranges::any_of(context.partition.units, shards_over_one_of_several),
       {Rule::kGradDivision, Rule::kGradNotReduced},
       "FSDP1's hybrid sharding over one rank takes that rank for all: it divides by the number of replicas, "
       "but does not add them up");
  tell(context.faults_seen.not_gathered_again, {Rule::kUseBeforeUnshard, Rule::kSteadyState},
       "FSDP1 gathers for the first backward only of forwards that ran before it");
  tell(context.faults_seen.lost_grad, {Rule::kGradNotReduced},
       "FSDP1 forgets the gradient of a unit whose backward begins and brings nothing more");
  tell(context.faults_seen.missed_hook, {Rule::kGradNotReduced},
       "FSDP1 reduces once for several forwards: what a later backward brings stays as it is");
  tell(context.faults_seen.mixed_with_reduced, {Rule::kGradNotReduced},
       "FSDP1 without sharding has one gradient: what no_sync accumulates is added to what is reduced "
       "already");
  tell(context.faults_seen.dropped_unreduced, {Rule::kGradNotReduced},
       "the program zeroes gradients that no backward has reduced");
  tell(true, {Rule::kLeak},
       "FSDP1 frees what it keeps after a forward in the unit's backward only, and an optimizer keeps its "
       "state: what no step that repeats uses stays");
  const auto zeroes = [](const ProgramCall& call) { return std::holds_alternative<ZeroGradCall>(call); };
  tell(!context.strategy.program.empty() && std::ranges::none_of(context.strategy.program.back(), zeroes),
       {Rule::kSteadyState}, "the step that repeats does not zero the gradients: they grow");
  return faults;
}

}  // namespace shardplan::fsdp1
