// What FSDP1 itself does wrong, or does wrong with this program.
#include <algorithm>

#include "policy/fsdp1/fsdp1_policy.h"

namespace shardplan {

std::vector<KnownFault> Fsdp1Policy::Faults() const {
  std::vector<KnownFault> faults;
  const auto tell = [&](bool happens, std::vector<Rule> rules, const char* why) {
    if (!happens) return;
    for (const Rule rule : rules) faults.push_back({rule, why});
  };
  const bool offloads = std::ranges::any_of(handles_, &Handle::offloads);
  tell(offloads, {Rule::kGradNotReduced, Rule::kSteadyState},
       "FSDP1 does not add to a gradient that it has offloaded: only no_sync() accumulates");
  tell(offloads, {Rule::kWriteRace},
       "FSDP1 does not wait for the copy of an offloaded parameter before the optimizer changes it: a "
       "backward "
       "does, an evaluation does not");
  const auto shards_over_one_of_several = [](const UnitChoice& choice) {
    return choice.unit.shard_communicator < 0 && choice.shard_size == 1 && choice.replicate_size > 1 &&
           choice.sharding != Fsdp1Sharding::kNoShard;
  };
  tell(std::ranges::any_of(partition_.units, shards_over_one_of_several),
       {Rule::kGradDivision, Rule::kGradNotReduced},
       "FSDP1's hybrid sharding over one rank takes that rank for all: it divides by the number of replicas, "
       "but "
       "does not add them up");
  tell(not_gathered_again_, {Rule::kUseBeforeUnshard, Rule::kSteadyState},
       "FSDP1 gathers for the first backward only of forwards that ran before it");
  tell(lost_grad_, {Rule::kGradNotReduced},
       "FSDP1 forgets the gradient of a unit whose backward begins and brings nothing more");
  tell(missed_hook_, {Rule::kGradNotReduced},
       "FSDP1 reduces once for several forwards: what a later backward brings stays as it is");
  tell(dropped_unreduced_, {Rule::kGradNotReduced},
       "the program zeroes gradients that no backward has reduced");
  tell(true, {Rule::kLeak},
       "FSDP1 frees what it keeps after a forward in the unit's backward only, and an optimizer keeps its "
       "state: "
       "what no step that repeats uses stays");
  const auto zeroes = [](const ProgramCall& call) { return std::holds_alternative<ZeroGradCall>(call); };
  tell(!strategy_.program.empty() && std::ranges::none_of(strategy_.program.back(), zeroes),
       {Rule::kSteadyState}, "the step that repeats does not zero the gradients: they grow");
  return faults;
}

}  // namespace shardplan
