// SPDX-License-Identifier: Apache-2.0
// Which module of a unit of several runs the unit's hooks.
#pragma once

#include <set>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// [Note: groups]
// The post-forward of a unit of several modules runs when the last of its modules has been left. The rest is
// of the release that the plan follows, whatever torch is installed
// (PyTorchRules::members_enter_one_by_one):
// - Plans of 2.11: the pre-forward runs for the first module entered of those that have yet to run, which are
//   then all of them. So a module that does not run keeps the post-forward from running, until the end of a
//   last backward forgets it.
// - Plans of 2.15: the pre-forward runs for each module; inputs of the first one in a forward get the unit's
//   post-backward. The post-forward of a forward's outermost unit completes a group of which a module has not
//   run. The end of any backward forgets the rest.
// FSDP2's _register_group_forward_hooks and FSDPState._force_complete_incomplete_states.
class ModuleGroups {
 public:
  struct Entered {
    bool runs_hook = true;
    bool registers_inputs = true;
  };

  explicit ModuleGroups(const Plan& plan);

  // A module of the unit is entered / left: does the unit's hook run? modules: of the unit. They are known by
  // their addresses.
  Entered Enter(UnitId unit, const std::vector<const void*>& modules);
  bool Leave(UnitId unit, const std::vector<const void*>& modules, const void* module);
  // Are outputs cast of a module that is left without the unit's hook?
  bool each_is_cast() const { return one_by_one_; }
  // The forward's outermost unit has been left: the units that it completes, in the order of their
  // pre-backwards.
  std::vector<UnitId> Complete(UnitId outermost);
  // The unit's pre-backward or post-backward has run.
  void InBackward(UnitId unit) { groups_[unit].in_forward = false; }
  void EndBackward(bool is_last);
  void Forget();

 private:
  struct Group {
    std::set<const void*> to_run;  // the modules that have not been left yet
    bool in_forward = false;
  };

  bool one_by_one_;
  std::vector<Group> groups_;  // by unit; nothing in those of one module
};

}  // namespace shardplan::executor
