// SPDX-License-Identifier: Apache-2.0
// The states of a model as the strategy makes them (fully_shard and share_comm_ctx in _fully_shard.py, and
// the prefetch lists of the strategy).
#pragma once

#include "policy/fault_list.h"
#include "policy/fsdp2/module_states.h"
#include "policy/optimizer_memory.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp2 {

// The settings of the unit's group by the strategy, before any setter is called.
ParamGroupSettings SettingsOf(const UnitChoice& choice, const Fsdp2Knobs& knobs);

// Adds a state for every unit to `model`. Arguments passed by reference have to live as long as they do.
void FullyShard(const PolicyInput& input, ProgramBuilder& program, OptimizerMemory& optimizer,
                FaultList& faults, ModuleStates& model);

// kBadInput: there is no such unit.
Status ShareCommContexts(const PolicyInput& input, const ModuleStates& model);
Status SetPrefetchLists(const PolicyInput& input, const ModuleStates& model);

}  // namespace shardplan::fsdp2
