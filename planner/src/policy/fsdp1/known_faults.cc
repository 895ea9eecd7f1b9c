// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/known_faults.h"

#include <algorithm>
#include <optional>
#include <variant>

namespace shardplan::fsdp1 {

std::vector<PyTorchFault> KnownFaults(const Context& context) {
  using enum PyTorchFault;
  std::vector<PyTorchFault> faults;
  const auto tell = [&](bool happens, PyTorchFault fault) {
    if (happens) faults.push_back(fault);
  };
  const auto offload = [](const std::optional<FlatParamConfig>& config) {
    return config && config->offloads;
  };
  const bool offloads = std::ranges::any_of(context.flat_params, offload);
  tell(offloads, kFsdp1OffloadedGradientReplaced);
  const auto shards_over_one_of_several = [](const UnitChoice& choice) {
    return choice.unit.shard_communicator < 0 && choice.shard_size == 1 && choice.replicate_size > 1 &&
           choice.sharding != Fsdp1Sharding::kNoShard;
  };
  tell(std::ranges::any_of(context.partition.units, shards_over_one_of_several), kFsdp1ReplicasNotAdded);
  tell(context.faults_seen.not_gathered_again, kFsdp1NotGatheredAgain);
  tell(context.faults_seen.lost_grad, kFsdp1LostGradient);
  tell(context.faults_seen.missed_hook, kFsdp1MissedHook);
  tell(context.faults_seen.mixed_with_reduced, kFsdp1MixedWithReduced);
  tell(context.faults_seen.dropped_unreduced, kFsdp1DroppedUnreduced);
  tell(true, kFsdp1KeptUnused);
  const auto zeroes = [](const ProgramCall& call) { return std::holds_alternative<ZeroGradCall>(call); };
  tell(!context.strategy.program.empty() && std::ranges::none_of(context.strategy.program.back(), zeroes),
       kFsdp1GradientsGrow);
  return faults;
}

}  // namespace shardplan::fsdp1
