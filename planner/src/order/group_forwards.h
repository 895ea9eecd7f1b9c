// SPDX-License-Identifier: Apache-2.0
// Hooks of units that are one module or a group of several (fully_shard([a, b])), and the unit that a forward
// is rooted at (_register_group_forward_hooks and FSDPState in _fsdp_state.py).
//
// A group's post-forward hook runs when all of its modules have run. Up to 2.11 its pre-forward hook runs for
// the first of them alone. Since 2.15 it runs for each, and the root's post-forward completes a group of
// which a module has not run: its pre-backward hook is then on the root's outputs (members_enter_one_by_one).
#pragma once

#include <set>
#include <vector>

#include "shardplan/schemas/pytorch_rules.h"
#include "units/partition.h"

namespace shardplan {

class GroupForwards {
 public:
  // The effect of entering a module that units hook.
  struct Entered {
    bool runs_hook = false;
    bool begins = false;            // the unit's forward
    bool registers_inputs = false;  // the unit's post-backward is on the inputs of this call
  };

  GroupForwards(const Partition& partition, const PyTorchRules& rules);

  Entered Enter(UnitId unit);
  // Whether the post-forward hook of `unit` runs.
  bool Leave(UnitId unit, ModuleId module);
  // In the post-forward of `unit`: the units that it completes, in that order.
  std::vector<UnitId> Complete(UnitId unit);
  void PreBackward(UnitId unit);
  void PostBackward(UnitId unit);
  void BackwardEnd(bool is_last_backward);
  // FSDPModule.reset_iter_state.
  void Reset();

  bool operator==(const GroupForwards&) const = default;

 private:
  const Partition* partition_;
  bool one_by_one_ = false;
  std::vector<std::set<ModuleId>> to_run_;  // by unit: modules that have not been left yet
  std::vector<bool> in_forward_;            // by unit: its parameter group is
  UnitId root_ = -1;                        // of the forward; -1: none
  bool final_callback_queued_ = false;
};

}  // namespace shardplan
