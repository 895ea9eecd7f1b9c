// Which module of a unit of several runs the unit's hooks.
#pragma once

#include <cstddef>
#include <set>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::python {

// [Note: groups]
// The pre-forward of a unit of several modules runs for the first one entered of those that have yet to run,
// which are then all of them; its post-forward when the last of them has been left. So a module that does not
// run keeps the post-forward from running, until the end of a last backward forgets it. FSDP2's
// _register_group_forward_hooks.
class ModuleGroups {
 public:
  explicit ModuleGroups(std::size_t units) : to_run_(units) {}

  // A module of the unit is entered / left (unit -1: of none): does the unit's hook run? Modules are known by
  // their addresses.
  bool Enter(UnitId unit, const std::vector<const void*>& modules);
  bool Leave(UnitId unit, const void* module);
  // The end of a last backward.
  void Forget();

 private:
  std::vector<std::set<const void*>> to_run_;  // by unit: the modules that have not been left yet
};

}  // namespace shardplan::python
