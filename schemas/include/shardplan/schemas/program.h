// SPDX-License-Identifier: Apache-2.0
// The program of a plan: the calls that the user makes in a step and the passes of the model that they run,
// procedures as steps, and lists of instructions that triggers share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// The calls of step `step` of a strategy: the last one's, where it has fewer; those that every training loop
// has, where it has none. `strategy` outlives what is returned.
const StepProgram& ProgramOfStep(const Strategy& strategy, std::int64_t step);

// The calls of micro-batch `microbatch`, behind those in `step`: the ones that the trace lists
// (Trace::calls), or else its first forward and its first backward.
void AddMicrobatch(const Trace& trace, std::int32_t microbatch, StepProgram& step);

// Adds the end of a step behind its micro-batches: the optimizer's step and zero_grad, or nothing where it
// steps in the backward.
void AddStepEnd(const Optimizer& optimizer, StepProgram& step);

// Is it FSDP2's reset_iter_state, behind a pass that raised?
bool IsReset(const ModuleCall& call);

// A strategy without a program has the calls that the trace lists, where it lists any. An optimizer that does
// not step in the backward follows, and zero_grad.
Strategy WithCallsOf(const Trace& trace, Strategy strategy);

// A call that runs a pass of the model.
struct PassCall {
  bool backward = false;
  std::int32_t pass = -1;  // index into ModelPasses::backwards, or ::forwards
  std::vector<std::int32_t> microbatches;
  bool operator==(const PassCall&) const = default;
};
// The pass calls of `program`, in order.
std::vector<PassCall> PassCallsOf(const StepProgram& program);

// The micro-batch of a call's forward number `forward`; forwards behind the last named one are of that.
std::int32_t MicrobatchOf(const std::vector<std::int32_t>& microbatches, std::int32_t forward);

bool IsBackward(SegmentPhase phase);

// Derives the model's passes (Plan::passes, Segment::pass) of a program that is written without a trace from
// what each step computes, call by call. A segment that several passes run is written once for each. The
// calls of `strategy.program` get the numbers of their passes; a step that has no calls there gets what it
// runs, the optimizer's step and zero_grad.
void NumberPasses(Plan& plan);

// The procedures of a plan (Plan::procedures) as a program of steps.

// Index into Plan::procedures; null: the plan has none of this kind for the unit.
const Procedure* FindProcedure(const Plan& plan, ProcedureKind kind, UnitId unit);

struct OnDemandProgram {
  Plan plan;
  // By step and trigger: the procedure that the trigger's instructions are (they are shared with it), an
  // index into Plan::procedures; -1: they are of none.
  std::vector<std::vector<std::int32_t>> procedures;
};

// [Note: states that procedures are called in]
// A plan with the tables of `plan` and steps in which everything is done on demand, one unit at a time. A
// unit is gathered where it is entered, forward and backward, and freed where it is left. Each step gets its
// gradients in another way, then the optimizer steps: reduced at once; kept for two micro-batches and reduced
// with the third's; kept and reduced alone. Gradients of HSDP are also reduced over the shards by the steps'
// own instructions, once or for two micro-batches, and then over the replicas. So every procedure is called
// in every state of its unit that it may be called in: what holds of this program holds of the procedures.
// Each procedure is a trigger of its own, which no call of strategy.program passes.
//
// A plan without procedures gives no steps.
OnDemandProgram OnDemandProgramOf(const Plan& plan);

// Lets triggers that issue the same share one list of instructions (plan.h, [Note: equal micro-batches]).

class InstructionSharing {
 public:
  // The list of `trigger` becomes that of the first trigger given with an equal one.
  void Share(Trigger& trigger);

 private:
  struct Hash {
    std::size_t operator()(const InstructionList& list) const;
  };
  std::unordered_set<InstructionList, Hash> lists_;
};

// Shares the lists of all triggers of all steps.
void ShareInstructions(Plan& plan);

}  // namespace shardplan
