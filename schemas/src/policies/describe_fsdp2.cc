// fully_shard, the parameter-group runtime.
#include "policies/policy_descriptions.h"

namespace shardplan::internal {
namespace {

std::string Fsdp2ReshardAdvice(const Strategy& /*strategy*/, const std::string& unit, bool /*is_root*/) {
  return "reshard_after_forward: true for " + unit;
}

std::vector<KnobChange> Fsdp2MemoryChanges(const Strategy& strategy) {
  Strategy reshard = strategy;
  reshard.reshard_after_forward = true;
  for (UnitRule& rule : reshard.units) rule.reshard_after_forward = true;
  Strategy no_prefetch = strategy;
  no_prefetch.fsdp2.forward_prefetch = no_prefetch.fsdp2.backward_prefetch = 0;
  no_prefetch.fsdp2.forward_prefetch_lists.clear();
  no_prefetch.fsdp2.backward_prefetch_lists.clear();
  Strategy one_input = strategy;
  one_input.fsdp2.reduce_scatter_inputs_in_flight = 1;
  return {{"reshard_after_forward: true, of the root too", reshard},
          {"no prefetch, forward or backward", no_prefetch},
          {"one reduce-scatter input in flight", one_input}};
}

}  // namespace

PolicyDescription DescribeFsdp2() {
  return {.name = "fsdp2",
          .accumulation_call = "set_requires_gradient_sync",
          // Its shards are those of parameters.
          .steps_original_parameters = [](const Strategy&) { return false; },
          .reshard_advice = Fsdp2ReshardAdvice,
          .memory_changes = Fsdp2MemoryChanges};
}

}  // namespace shardplan::internal
