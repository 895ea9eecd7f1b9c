// SPDX-License-Identifier: Apache-2.0
// The program: a plan resolved to what the hot path needs. Indices and numbers only, in host order.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// The effect of one instruction, after resolution. `a`, `b`: see each.
enum class OpCode : std::uint8_t {
  kNothing,          // a collective of one rank in place, memory that the model owns
  kCompute,          // a: segment, b: micro-batch, src: index into Program::grad_targets
  kAllocate,         // a: buffer
  kFree,             // a: buffer, b: index into Program::frees
  kDropGradients,    // the same, of a grad_unsharded buffer of a model that runs itself
  kDropActivations,  // the same, of an activation buffer that the model holds
  kBindUnsharded,    // a: unit, b: buffer
  kBindSharded,      // a: unit, b: buffer
  kCopy,             // a: copy
  kGradCast,         // a: copy; an alias when dst is not alive and nothing is to be converted
  kAccumulate,       // a: copy; a plain copy when dst is empty
  kCollective,       // a: collective
  kScale,            // a: buffer, b: index into Program::divisors
  kRecord,           // a: event
  kWait,             // a: event
  kHostWait,         // a: event
  kOptimizerStep,    // a: unit, b: parameter
  kUpdate,           // a: buffer of the exchange; the model takes the instruction as it is
  kZeroGrad,         // a: unit
};

struct Op {
  OpCode code = OpCode::kNothing;
  bool takes_gradients = false;    // src is a grad_unsharded buffer that the model supplies
  bool takes_activations = false;  // src is an activation that the model holds
  bool gives_activations = false;  // dst is
  bool reads_shard = false;        // src is a param_sharded buffer
  bool extended = false;           // moves parameters with an all-gather extension: ask the model
  bool final_gradient = false;     // dst is a sharded gradient: tell the model
  bool last_reduction = false;     // dst is reduced over all ranks after it: tell the model
  bool begins_group = false;       // of collectives: this one and those behind it up to ends_group
  bool ends_group = false;
  StreamId stream = -1;
  std::int32_t a = -1;
  std::int32_t b = -1;
  BufferId src = -1;
  BufferId dst = -1;
};

// Whether the instruction gives a stream, or the host, something to do that takes time.
bool HasWork(const Op& op);

struct FreeSpec {
  std::vector<StreamId> safe_after;
  std::vector<std::int32_t> parts;  // empty: the buffer ends
  bool operator==(const FreeSpec&) const = default;
};

struct ProgramTrigger {
  TriggerKey key;
  std::int32_t first = 0;  // ops [first, first + count)
  std::int32_t count = 0;
  std::int32_t step = 0;     // index into Plan::steps
  std::int32_t trigger = 0;  // index in the step
};

// A procedure of the plan.
struct ProgramProcedure {
  std::int32_t first = 0;  // ops [first, first + count)
  std::int32_t count = 0;
  std::vector<BufferId> supplied;  // grad_unsharded buffers that it takes from the model
};

struct Program {
  std::vector<ProgramTrigger> triggers;      // of all steps, in order
  std::vector<ProgramProcedure> procedures;  // as Plan::procedures
  std::vector<Op> ops;                       // one for each instruction
  std::vector<std::int32_t> step_begin;      // by step: index into triggers; one more at the end
  std::vector<FreeSpec> frees;
  std::vector<double> divisors;
  std::vector<std::vector<GradTarget>> grad_targets;    // of each compute instruction, as Segment::grads
  std::vector<std::vector<ActivationUse>> activations;  // by segment
  std::vector<CopySpec> copies;
  std::vector<CollectiveSpec> collectives;
};

// Marks collectives that follow one another and may be launched as one.
void FindGroups(const Plan& plan, Program& program);

// The model's own share of the work (Model::RunsItself, MakesGradients, HoldsActivations).
struct ModelTraits {
  bool runs_itself = false;
  bool makes_gradients = false;
  bool holds_activations = false;
};

// Resolves the plan for one rank. Errors as Replayer::Create.
Result<Program> BuildProgram(const Plan& plan, std::int64_t rank, ModelTraits model);

}  // namespace shardplan::executor
