// SPDX-License-Identifier: Apache-2.0
#include "training/runtime/module_groups.h"

#include <cstddef>
#include <utility>

#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan::executor {

ModuleGroups::ModuleGroups(const Plan& plan)
    : one_by_one_(RulesOf(plan.strategy).members_enter_one_by_one), groups_(plan.units.size()) {}

ModuleGroups::Entered ModuleGroups::Enter(UnitId unit, const std::vector<const void*>& modules) {
  if (modules.size() < 2) return {};
  Group& group = groups_[unit];
  const bool begins = group.to_run.empty();
  if (begins) group.to_run.insert(modules.begin(), modules.end());
  if (!one_by_one_) return {.runs_hook = begins, .registers_inputs = begins};
  return {.runs_hook = true, .registers_inputs = !std::exchange(group.in_forward, true)};
}

bool ModuleGroups::Leave(UnitId unit, const std::vector<const void*>& modules, const void* module) {
  if (modules.size() < 2) return true;
  Group& group = groups_[unit];
  const bool awaited = group.to_run.erase(module) > 0;
  if (!group.to_run.empty() || (one_by_one_ && !awaited)) return false;
  group.in_forward = false;
  return true;
}

std::vector<UnitId> ModuleGroups::Complete(UnitId outermost) {
  std::vector<UnitId> completed;
  if (!one_by_one_) return completed;
  // Units are in the order of the module tree; FSDPState goes backwards through it.
  for (auto unit = static_cast<UnitId>(groups_.size()) - 1; unit >= 0; --unit) {
    if (unit == outermost || groups_[unit].to_run.empty()) continue;
    groups_[unit] = {};
    completed.push_back(unit);
  }
  return completed;
}

void ModuleGroups::EndBackward(bool is_last) {
  if (one_by_one_ || is_last) Forget();
}

void ModuleGroups::Forget() { groups_.assign(groups_.size(), {}); }

}  // namespace shardplan::executor
