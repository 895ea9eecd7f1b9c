// fully_shard, the parameter-group runtime.
#include "policies/policies.h"

namespace shardplan::internal {
namespace {

double Fsdp2GradientDivisor(const Strategy& strategy, const Unit& unit, double ranks) {
  const std::optional<double>& all = strategy.fsdp2.gradient_divide_factor;
  const std::optional<double> factor = unit.gradient_divide_factor ? unit.gradient_divide_factor : all;
  return factor.value_or(ranks) * unit.hook_divisor;
}

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

PolicyKnobs Fsdp2PolicyKnobs() {
  return {.name = "fsdp2",
          .accumulation_call = "set_requires_gradient_sync",
          // Its shards are those of parameters.
          .steps_original_parameters = [](const Strategy&) { return false; },
          .gradient_divisor = Fsdp2GradientDivisor,
          .reshard_advice = Fsdp2ReshardAdvice,
          .memory_changes = Fsdp2MemoryChanges};
}

}  // namespace shardplan::internal
