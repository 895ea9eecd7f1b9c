// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/fully_shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "shardplan/planner/planner.h"

namespace shardplan::fsdp2 {
namespace {

std::unexpected<Error> NoSuchUnit(std::string pointer, const std::string& fqn) {
  return MakeInputError(std::move(pointer), "there is no such unit", fqn);
}

// The knobs forward_prefetch / backward_prefetch are distances: lists over the units in forward order, the
// root left as it is (what torchtitan sets).
void SetPrefetchDistances(const Fsdp2Knobs& knobs, const RecordedStep& step, const ModuleStates& model) {
  std::vector<FsdpState*> order;
  for (const HookPoint& event : step.events) {
    if (event.kind == HookPointKind::kForwardEnd) break;
    if (event.kind != HookPointKind::kPreForward) continue;
    FsdpState& state = model[event.unit];
    if (state.group() == nullptr || state.scope().choice().is_root) continue;
    if (state.scope().unit().parameter_group > 0) continue;
    if (std::ranges::find(order, &state) == order.end()) order.push_back(&state);
  }
  const auto count = static_cast<std::int32_t>(order.size());
  for (std::int32_t i = 0; i < count; ++i) {
    std::vector<FsdpState*> after, before;
    for (std::int32_t d = 1; d <= knobs.forward_prefetch && i + d < count; ++d) after.push_back(order[i + d]);
    for (std::int32_t d = 1; d <= knobs.backward_prefetch && i - d >= 0; ++d) before.push_back(order[i - d]);
    model.SetPrefetch(*order[i], after, PrefetchPass::kForward);
    model.SetPrefetch(*order[i], before, PrefetchPass::kBackward);
  }
}

Status SetLists(const std::vector<PrefetchList>& lists, std::string_view pointer, PrefetchPass pass,
                const ModuleStates& model) {
  for (std::size_t i = 0; i < lists.size(); ++i) {
    FsdpState* state = model.Find(lists[i].unit);
    if (state == nullptr) {
      return NoSuchUnit(fmt::format("{}/{}/unit", pointer, i), lists[i].unit);
    }
    std::vector<FsdpState*> targets;
    for (std::size_t t = 0; t < lists[i].prefetch.size(); ++t) {
      const std::string& fqn = lists[i].prefetch[t];
      targets.push_back(model.Find(fqn));
      if (targets.back() == nullptr) {
        return NoSuchUnit(fmt::format("{}/{}/prefetch/{}", pointer, i, t), fqn);
      }
    }
    model.SetPrefetch(*state, targets, pass);
  }
  return {};
}

// The unit of this name, or those of all modules that the entry matches as an entry of a unit rule does.
std::vector<FsdpState*> StatesNamed(const std::string& entry, const Trace& trace, const ModuleStates& model) {
  if (FsdpState* state = model.Find(entry)) return {state};
  std::vector<FsdpState*> states;
  const Result<std::vector<std::string>> modules = MatchModules(trace, entry);
  if (!modules) return states;
  for (const std::string& fqn : *modules) {
    FsdpState* state = model.Find(fqn);
    if (state != nullptr && std::ranges::find(states, state) == states.end()) states.push_back(state);
  }
  return states;
}

}  // namespace

ParamGroupSettings SettingsOf(const UnitChoice& choice, const Fsdp2Knobs& knobs) {
  return {
      .part_after_backward = knobs.part_after_backward,
      .unshard_async_op = knobs.unshard_async_op,
      .force_sum_reduction_for_comms = knobs.force_sum_reduction,
      .separate_reduce_scatter_group = knobs.separate_reduce_scatter_communicator,
      .allocate_memory_from_process_group = knobs.allocate_memory_from_process_group,
      .reduce_scatter_max_input_buffers = static_cast<std::size_t>(knobs.reduce_scatter_inputs_in_flight),
      .gradient_divide_factor = knobs.gradient_divide_factor,
      // fully_shard of replicas alone: there is no other mesh to reshard to.
      .post_forward_ranks = choice.data_parallel.shard.empty() ? 0 : choice.post_forward_size,
      .default_backward_prefetch = knobs.backward_prefetch != 0,
  };
}

void FullyShard(const PolicyInput& input, ProgramBuilder& program, OptimizerMemory& optimizer,
                FaultList& faults, ModuleStates& model) {
  const Strategy& strategy = input.strategy;
  OptimizerMemory* in_backward = strategy.optimizer.in_backward ? &optimizer : nullptr;
  for (std::size_t u = 0; u < input.partition.units.size(); ++u) {
    const UnitScope scope(static_cast<UnitId>(u), input.partition, strategy, program);
    model.Add(
        std::make_unique<FsdpState>(scope, SettingsOf(scope.choice(), strategy.fsdp2), in_backward, faults));
  }
}

Status ShareCommContexts(const PolicyInput& input, const ModuleStates& model) {
  const std::vector<std::vector<std::string>>& contexts = input.strategy.fsdp2.shared_comm_contexts;
  for (std::size_t s = 0; s < contexts.size(); ++s) {
    FsdpState* first = nullptr;
    for (std::size_t m = 0; m < contexts[s].size(); ++m) {
      const std::vector<FsdpState*> named = StatesNamed(contexts[s][m], input.trace, model);
      if (named.empty()) {
        return NoSuchUnit(fmt::format("/fsdp2/shared_comm_contexts/{}/{}", s, m), contexts[s][m]);
      }
      if (first == nullptr) first = named.front();
      for (const FsdpState* state : named) {
        for (FsdpState* group : model.GroupsOf(*state)) group->ShareCommContext(first->comm_ctx());
      }
    }
  }
  return {};
}

Status SetPrefetchLists(const PolicyInput& input, const ModuleStates& model) {
  const Fsdp2Knobs& knobs = input.strategy.fsdp2;
  SetPrefetchDistances(knobs, input.steps.front(), model);
  if (Status s = SetLists(knobs.forward_prefetch_lists, "/fsdp2/forward_prefetch_lists",
                          PrefetchPass::kForward, model);
      !s) {
    return s;
  }
  return SetLists(knobs.backward_prefetch_lists, "/fsdp2/backward_prefetch_lists", PrefetchPass::kBackward,
                  model);
}

}  // namespace shardplan::fsdp2
