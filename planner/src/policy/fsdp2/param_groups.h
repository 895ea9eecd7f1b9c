// SPDX-License-Identifier: Apache-2.0
// Work on the parameter groups of all units at a point, whatever the hooks decide.
#pragma once

#include <vector>

#include "policy/fsdp2/fsdp_param_group.h"
#include "policy/optimizer_memory.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp2 {

// By unit; null: it has no parameters.
using ParamGroups = std::vector<FsdpParamGroup*>;

// After the setters that are called before the first step: Unit::gradient_divide_factor, and memory that is
// there all the time.
void SetUpGroups(const PolicyInput& input, const ParamGroups& groups, ProgramBuilder& program);

// A segment of the model, and the gradients that it makes. `backward_unit`: of the last pre-backward, -1:
// none; the backward of a trace without operators reads its parameters.
void Compute(const PolicyInput& input, const HookPoint& event, UnitId backward_unit,
             const ParamGroups& groups, ProgramBuilder& program);

// The group's parameters that have a sharded gradient.
SteppedUnit SteppedBy(const FsdpParamGroup& group);
// The optimizer steps what has a sharded gradient.
void StepOptimizer(const ParamGroups& groups, OptimizerMemory& optimizer);
void ZeroGrad(const HookPoint& event, const ParamGroups& groups, ProgramBuilder& program);

// Emits the procedures. kBadInput: where PyTorch fails.
Status EmitProcedures(const ParamGroups& groups, OptimizerMemory* optimizer_in_backward, FaultList& faults);

}  // namespace shardplan::fsdp2
