// SPDX-License-Identifier: Apache-2.0
// Procedures of a unit, beside the steps: the same classes as in a step, on the compute stream.
#pragma once

#include "policy/fault_list.h"
#include "policy/fsdp2/param_group_settings.h"
#include "policy/fsdp2/unit_scope.h"
#include "policy/optimizer_memory.h"
#include "shardplan/schemas/error.h"

namespace shardplan::fsdp2 {

// Emits the unit's procedures. `settings`: as they are after the last step. `optimizer_in_backward`: null
// where none steps in the backward. kBadInput: where PyTorch fails.
Status EmitProcedures(const UnitScope& scope, ParamGroupSettings settings,
                      OptimizerMemory* optimizer_in_backward, FaultList& faults);

}  // namespace shardplan::fsdp2
