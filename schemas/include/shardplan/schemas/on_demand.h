// SPDX-License-Identifier: Apache-2.0
// The procedures of a plan (Plan::procedures) as a program of steps.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

// Index into Plan::procedures; null: the plan has none of this kind for the unit.
const Procedure* FindProcedure(const Plan& plan, ProcedureKind kind, UnitId unit);

struct OnDemandProgram {
  Plan plan;
  // By step and trigger: the procedure that the trigger's instructions are (they are shared with it), an
  // index into Plan::procedures; -1: they are of none.
  std::vector<std::vector<std::int32_t>> procedures;
};

// [Note: states that procedures are called in]
// A plan with the tables of `plan` and steps in which everything is done on demand, one unit at a time: each
// is gathered where it is entered, forward and backward, and freed where it is left; each step gets its
// gradients in another way (reduced at once; kept for two micro-batches and reduced with the third's; kept
// and reduced alone; of HSDP reduced over the shards by what the steps issue, once or for two micro-batches,
// and then over the replicas), then the optimizer steps. So every procedure is called in every state of its
// unit that it may be called in: what holds of this program holds of the procedures. Each procedure is a
// trigger of its own, which no call of strategy.program passes.
//
// A plan without procedures gives no steps.
OnDemandProgram OnDemandProgramOf(const Plan& plan);

}  // namespace shardplan
