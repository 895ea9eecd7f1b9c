// SPDX-License-Identifier: Apache-2.0
// fully_shard, the parameter-group runtime.
#include "policies/policies.h"
#include "shardplan/schemas/precision.h"

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

// The strategy's dimensions, or those of a call of fully_shard.
std::vector<DataParallelDims> Fsdp2UnitRanks(const Strategy& strategy,
                                             const std::vector<StrategyMeshDim>& /*mesh*/) {
  std::vector<DataParallelDims> all = {GivenDims(strategy)};
  for (const UnitRule& rule : strategy.units) {
    if (rule.data_parallel) all.push_back(*rule.data_parallel);
    for (const ParameterMeshRule& mesh : rule.parameter_meshes) all.push_back(mesh.data_parallel);
  }
  return all;
}

// Gradients that are reduced in the dtype that they are made in stay where autograd adds to them.
std::vector<ProcedureKind> Fsdp2Procedures(const Unit& unit) {
  std::vector<ProcedureKind> kinds = {ProcedureKind::kUnshard, ProcedureKind::kReshard};
  if (!Trains(unit)) return kinds;
  kinds.push_back(ProcedureKind::kReduce);
  if (AccumulatesInOtherDType(unit)) {
    kinds.insert(kinds.end(), kKeepingKinds.begin(), kKeepingKinds.end());
  }
  return kinds;
}

std::vector<CallForm> Fsdp2Calls() {
  std::vector<CallForm> calls;
  for (const char* setter :
       {"set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward",
        "set_reshard_after_backward", "_set_unshard_async_op", "set_separate_reduce_scatter_group",
        "set_force_sum_reduction_for_comms", "set_unshard_in_backward",
        "set_allocate_memory_from_process_group_for_comm", "set_is_last_backward", "set_post_optim_event"}) {
    calls.push_back({.method = setter, .flags = {}});
  }
  for (const char* prefetch : {"set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"}) {
    calls.push_back({.method = prefetch, .argument = CallArgument::kModules, .flags = {}});
  }
  calls.push_back({.method = "set_gradient_divide_factor",
                   .argument = CallArgument::kNumber,
                   .in_program = false,
                   .flags = {}});
  calls.push_back(
      {.method = "set_reduce_scatter_max_input_buffers", .argument = CallArgument::kCount, .flags = {}});
  for (const char* setter : {"set_manual_backward_finalization", "set_reduce_scatter_unused_params"}) {
    calls.push_back({.method = setter, .flags = {}, .since = PyTorchVersion::k2_15});
  }
  calls.push_back({.method = "set_keep_unsharded_storage",
                   .in_program = false,
                   .flags = {},
                   .since = PyTorchVersion::k2_15});
  for (const char* use : {"finalize_backward", "wait_for_gradient_reduction", "reset_iter_state"}) {
    calls.push_back({.method = use, .in_setup = false, .flags = {}, .since = PyTorchVersion::k2_15});
  }
  for (const char* use : {"unshard", "wait_for_unshard", "reshard", "state_dict", "load_state_dict"}) {
    calls.push_back({.method = use, .in_setup = false, .flags = {}});
  }
  return calls;
}

}  // namespace

PolicyKnobs Fsdp2PolicyKnobs() {
  return {.name = "fsdp2",
          .calls = Fsdp2Calls(),
          .layout = LayoutKind::kPerParameter,
          .unit_ranks = Fsdp2UnitRanks,
          .unit_precisions = [](const Strategy& strategy, const Unit&) { return GivenPrecisions(strategy); },
          .procedures = Fsdp2Procedures,
          .accumulation_call = "set_requires_gradient_sync",
          // Its shards are those of parameters.
          .steps_original_parameters = [](const Strategy&) { return false; },
          .gradient_divisor = Fsdp2GradientDivisor,
          .reshard_advice = Fsdp2ReshardAdvice,
          .memory_changes = Fsdp2MemoryChanges};
}

PolicyKnobs ForeignPolicyKnobs() {
  PolicyKnobs knobs = Fsdp2PolicyKnobs();
  knobs.name.clear();
  std::erase_if(knobs.calls, [](const CallForm& call) {
    return call.method != "set_requires_gradient_sync" && call.method != "set_requires_all_reduce";
  });
  knobs.reshard_advice = [](const Strategy& strategy, const std::string& unit, bool) {
    return "a knob of " + strategy.policy + " that frees " + unit;
  };
  knobs.memory_changes = [](const Strategy&) { return std::vector<KnobChange>(); };
  return knobs;
}

}  // namespace shardplan::internal
