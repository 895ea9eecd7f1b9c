// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/module_states.h"

#include <algorithm>
#include <iterator>

namespace shardplan::fsdp2 {

FsdpState* ModuleStates::Find(const std::string& fqn) const {
  for (const std::unique_ptr<FsdpState>& state : states_) {
    if (state->scope().unit().fqn == fqn) return state.get();
  }
  return OfModule(fqn).value_or(nullptr);
}

std::vector<FsdpState*> ModuleStates::GroupsOf(const FsdpState& state) const {
  std::vector<FsdpState*> groups;
  for (const UnitId unit : shardplan::GroupsOf(partition_, state.scope().id()))
    groups.push_back(&(*this)[unit]);
  return groups;
}

void ModuleStates::SetPrefetch(const FsdpState& state, const std::vector<FsdpState*>& targets,
                               PrefetchPass pass) const {
  const bool forward = pass == PrefetchPass::kForward;
  std::vector<FsdpState*> groups;
  for (const FsdpState* target : targets) {
    std::vector<FsdpState*> of_target = GroupsOf(*target);
    if (!forward) std::ranges::reverse(of_target);
    groups.insert(groups.end(), of_target.begin(), of_target.end());
  }
  for (FsdpState* group : GroupsOf(state)) {
    (forward ? group->states_to_forward_prefetch() : group->states_to_backward_prefetch()) = groups;
  }
}

Result<FsdpState*> ModuleStates::OfModule(const std::string& fqn) const {
  const Result<UnitId> unit = UnitOfModule(index_, partition_, fqn);
  if (!unit) return std::unexpected(unit.error());
  if (*unit < 0) {
    return MakeInputError("", "fully_shard is not called on this module", DisplayName(fqn), "a unit");
  }
  return &(*this)[*unit];
}

std::vector<FsdpState*> ModuleStates::StatesUnder(ModuleId root) const {
  std::vector<FsdpState*> states;
  std::vector<bool> visited(trace_.modules.size(), false);
  std::vector<ModuleId> stack = {root};
  while (!stack.empty()) {
    const ModuleId module = stack.back();
    stack.pop_back();
    if (visited[module]) continue;
    visited[module] = true;
    if (const UnitId unit = partition_.unit_of_module[module]; unit >= 0) {
      std::ranges::copy(GroupsOf((*this)[unit]), std::back_inserter(states));
    }
    const std::vector<ModuleId>& children = index_.children[module];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      stack.push_back(index_.canonical[*child]);
    }
  }
  return states;
}

std::vector<ModuleId> ModuleStates::ModulesUnder(const std::string& module) const {
  std::vector<ModuleId> modules;
  for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
    if (IsUnder(trace_.modules[m].fqn, module)) modules.push_back(static_cast<ModuleId>(m));
  }
  return modules;
}

std::vector<FsdpState*> ModuleStates::StatesUnder(const std::string& module) const {
  std::vector<FsdpState*> states;
  for (const UnitId unit : UnitsUnder(trace_, index_, partition_, module)) states.push_back(&(*this)[unit]);
  return states;
}

std::vector<FsdpState*> ModuleStates::ManagersUnder(const std::string& module) const {
  std::vector<FsdpState*> states;
  for (const ModuleId m : ModulesUnder(module)) {
    const UnitId unit = partition_.managed_by[index_.canonical[m]];
    if (unit < 0) continue;
    for (FsdpState* state : GroupsOf((*this)[unit])) {
      const bool manages =
          std::ranges::any_of(trace_.modules[m].parameters, [&](const NamedParameter& named) {
            const std::vector<ParameterId>& held = state->scope().choice().parameter_ids;
            return state->scope().choice().groups == 1 ||
                   std::ranges::find(held, named.parameter) != held.end();
          });
      if (manages) states.push_back(state);
    }
  }
  return states;
}

std::size_t ModuleStates::CountRoots() const {
  return static_cast<std::size_t>(std::ranges::count_if(states_, [](const auto& s) { return s->is_root(); }));
}

}  // namespace shardplan::fsdp2
