#include "policy/fsdp2/module_states.h"

#include <algorithm>

namespace shardplan::fsdp2 {

FsdpState* ModuleStates::Find(const std::string& fqn) const {
  for (const std::unique_ptr<FsdpState>& state : states_) {
    if (state->scope().unit().fqn == fqn) return state.get();
  }
  return OfModule(fqn).value_or(nullptr);
}

Result<FsdpState*> ModuleStates::OfModule(const std::string& fqn) const {
  const auto found = index_.by_fqn.find(fqn);
  if (found == index_.by_fqn.end()) return MakeInputError("", "there is no such module", fqn);
  const UnitId unit = partition_.unit_of_module[index_.canonical[found->second]];
  if (unit < 0) {
    return MakeInputError("", "fully_shard is not called on this module", DisplayName(fqn), "a unit");
  }
  return &(*this)[unit];
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
    if (const UnitId unit = partition_.unit_of_module[module]; unit >= 0) states.push_back(&(*this)[unit]);
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
    const std::string& fqn = trace_.modules[m].fqn;
    const bool under = module.empty() || fqn == module || fqn.starts_with(module + ".");
    if (under) modules.push_back(static_cast<ModuleId>(m));
  }
  return modules;
}

std::vector<FsdpState*> ModuleStates::StatesUnder(const std::string& module) const {
  std::vector<FsdpState*> states;
  for (const ModuleId m : ModulesUnder(module)) {
    const UnitId unit = partition_.unit_of_module[index_.canonical[m]];
    if (unit < 0 || std::ranges::find(states, &(*this)[unit]) != states.end()) continue;
    states.push_back(&(*this)[unit]);
  }
  return states;
}

std::vector<FsdpState*> ModuleStates::ManagersUnder(const std::string& module) const {
  std::vector<FsdpState*> states;
  for (const ModuleId m : ModulesUnder(module)) {
    const UnitId unit = partition_.managed_by[index_.canonical[m]];
    if (unit >= 0 && !trace_.modules[m].parameters.empty()) states.push_back(&(*this)[unit]);
  }
  return states;
}

std::size_t ModuleStates::CountRoots() const {
  return static_cast<std::size_t>(std::ranges::count_if(states_, [](const auto& s) { return s->is_root(); }));
}

}  // namespace shardplan::fsdp2
