#include "module_groups.h"

namespace shardplan::python {

bool ModuleGroups::Enter(UnitId unit, const std::vector<const void*>& modules) {
  if (modules.size() < 2) return true;
  std::set<const void*>& to_run = to_run_[unit];
  if (!to_run.empty()) return false;
  to_run.insert(modules.begin(), modules.end());
  return true;
}

bool ModuleGroups::Leave(UnitId unit, const void* module) {
  if (unit < 0) return true;
  to_run_[unit].erase(module);
  return to_run_[unit].empty();
}

void ModuleGroups::Forget() {
  for (std::set<const void*>& to_run : to_run_) to_run.clear();
}

}  // namespace shardplan::python
