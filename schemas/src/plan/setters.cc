// SPDX-License-Identifier: Apache-2.0
#include <variant>

#include "shardplan/schemas/policy_knobs.h"

namespace shardplan {

bool IsUnder(std::string_view fqn, std::string_view above) {
  if (above.empty() || fqn == above) return true;
  return fqn.size() > above.size() && fqn.starts_with(above) && fqn[above.size()] == '.';
}

bool Reaches(const ModuleCall& call, std::string_view fqn) {
  return call.recurse ? IsUnder(fqn, call.module) : fqn == call.module;
}

bool FlagSetOn(const Strategy& strategy, const Unit& unit, std::string_view method) {
  if (unit.modules.empty()) return false;
  bool flag = false;
  const auto note = [&](const ModuleCall& call) {
    if (call.method == method && Reaches(call, unit.modules.front())) flag = call.value.value_or(true);
  };
  for (const ModuleCall& call : strategy.setup) note(call);
  if (strategy.program.empty()) return flag;
  for (const ProgramCall& call : strategy.program.back()) {
    if (const auto* of_module = std::get_if<ModuleCall>(&call)) note(*of_module);
  }
  return flag;
}

}  // namespace shardplan
