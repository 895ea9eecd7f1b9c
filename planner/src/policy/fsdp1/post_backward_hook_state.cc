// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/post_backward_hook_state.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <variant>

namespace shardplan::fsdp1 {

UndoneCalls CallsUndoneBy(const Trace& trace, const ModelIndex& index, const Partition& partition,
                          const Pass& backward, const std::vector<ForwardRun>& forwards) {
  UndoneCalls result;
  std::set<ParameterId> trained;
  std::set<std::tuple<ModuleId, std::int32_t, std::size_t>> ready;  // calls of modules, by covered forward
  for (const TraceEvent& event : backward.events) {
    if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) trained.insert(grad->parameter);
    const auto* output = std::get_if<OutputGradReadyEvent>(&event);
    if (output == nullptr || output->forward >= std::ssize(forwards)) continue;
    ready.insert({index.canonical[output->module], output->occurrence, output->forward});
  }
  for (std::size_t f = 0; f < std::min(forwards.size(), backward.forwards.size()); ++f) {
    std::map<ModuleId, std::int32_t> calls;
    for (const TraceEvent& event : trace.forwards[backward.forwards[f]].events) {
      const auto* enter = std::get_if<EnterEvent>(&event);
      if (enter == nullptr) continue;
      const ModuleId module = index.canonical[enter->module];
      const std::int32_t occurrence = calls[module]++;
      if (!ready.contains({module, occurrence, f})) continue;
      const UnitId own = partition.unit_of_module[module];
      if (own >= 0) result.reached.insert({own, occurrence, forwards[f]});
      const UnitId unit = partition.managed_by[module];
      const auto trains = [&](const NamedParameter& named) { return trained.contains(named.parameter); };
      if (unit < 0 || !std::ranges::any_of(trace.modules[module].parameters, trains)) continue;
      const ModuleId wrapped = index.by_fqn.find(partition.units[unit].unit.fqn)->second;
      const auto entered = calls.find(index.canonical[wrapped]);
      if (entered != calls.end()) result.with_gradients.insert({unit, entered->second - 1, forwards[f]});
    }
  }
  return result;
}

void PostBackwardHookState::OnForwardBegin(const ForwardRun& forward) {
  std::erase_if(uses_, [&](const UnitUse& use) { return use.call.forward == forward; });
}

void PostBackwardHookState::Register(const UnitCall& call, const UnitCall& views) {
  uses_.push_back({call, views});
  if (!accumulator_) accumulator_ = views;
}

void PostBackwardHookState::RegisterInRecomputation() {
  if (accumulator_) return;
  // Without casts it is the accumulator that the forward's gradients go to, whichever it is; casts have made
  // another one, which no gradient goes to.
  accumulator_ = UnitCall{};
  FindWhereItRuns();
}

void PostBackwardHookState::OnBackwardBegin(const UndoneCalls& undone,
                                            const std::vector<ForwardRun>& forwards) {
  undone_.clear();
  for (const UnitUse& use : uses_) {
    if (std::ranges::find(forwards, use.call.forward) != forwards.end()) undone_.push_back(use);
  }
  for (const std::set<UnitCall>* kept : {&undone.reached, &undone.with_gradients}) {
    const auto is_kept = [&](const UnitUse& use) { return kept->contains(use.call); };
    if (std::ranges::any_of(undone_, is_kept)) std::erase_if(undone_, std::not_fn(is_kept));
  }
  FindWhereItRuns();
}

void PostBackwardHookState::FindWhereItRuns() {
  runs_at_.reset();
  if (!accumulator_) return;
  for (const UnitUse& use : undone_) {
    if (casts_params_ && use.views != *accumulator_) continue;
    runs_at_ = use.views;
    return;
  }
}

void PostBackwardHookState::OnBackwardEnd(const std::vector<ForwardRun>& forwards) {
  std::erase_if(uses_, [&](const UnitUse& use) {
    return std::ranges::find(forwards, use.call.forward) != forwards.end();
  });
  undone_.clear();
  runs_at_.reset();
}

}  // namespace shardplan::fsdp1
