// SPDX-License-Identifier: Apache-2.0
// The calls that the user makes in a step, and the passes of the model that they run.
#pragma once

#include <cstdint>
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

// What ends a step behind its micro-batches: the optimizer's step and zero_grad, or nothing where it steps in
// the backward.
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

}  // namespace shardplan
