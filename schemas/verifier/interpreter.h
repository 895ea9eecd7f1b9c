// SPDX-License-Identifier: Apache-2.0
// Runs a plan's program on the abstract state: clocks, memory, gradients, and which buffer each unit's
// parameters are views of. The meaning of an instruction is here; whether that is right, the rules say
// (rules.h).
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/activations.h"
#include "verifier/clocks.h"
#include "verifier/compute.h"
#include "verifier/exchanges.h"
#include "verifier/grad_buffers.h"
#include "verifier/gradients.h"
#include "verifier/memory.h"
#include "verifier/state.h"
#include "verifier/words/words.h"

namespace shardplan::verifier {

class Interpreter {
 public:
  // `plan` has passed CheckTables.
  Interpreter(const Plan& plan, Reporter& reporter);

  void RunStep(std::int32_t step);
  Snapshot TakeSnapshot() const;
  // Whether a cycle of steps leaves memory over. It then does so each time, whatever came before.
  bool LeavesOver() const { return leaves_over_; }
  // Reports leaks and other differences between the beginning of the cycle of steps that repeats and now.
  // True if there is none.
  bool CheckCycle(const Snapshot& before, std::int32_t steps_in_cycle);

 private:
  void Run(const Instruction& i, Position at);
  void RunMemory(const Instruction& i, Position at);
  void RunCompute(const Instruction& i, Position at);
  void RunUnshard(const Instruction& i, Position at);
  void RunGradient(const Instruction& i, Position at);
  void RunGradZero(const Instruction& i, Position at);
  void RunCopy(const Instruction& i, Position at);
  void UseActivations(SegmentId segment, const Work& work);
  bool NeedStorages(BufferId buffer, Position at);
  void CheckBroughtBack(const Instruction& i, Position at);
  std::int32_t MicrobatchOfTrigger(Position at) const;
  void RunOrder(const Instruction& i, Position at);
  void RunOptimizer(const Instruction& i, Position at);
  void RunExchange(const Instruction& i, Position at);
  bool StepUnit(UnitId unit, const std::vector<std::int32_t>& parameters, const Work& work);
  void UseOwnMemory(const Instruction& i, const std::vector<UnitId>& stepped, const Work& work);
  void OutdateCopies(UnitId unit, const std::vector<std::int32_t>& parameters, Position at);
  void CheckStatesOf(UnitId unit, const Work& work);
  void Update(const std::vector<BufferId>& buffers, const Work& work);
  void CheckStates();
  void CutPieces(const Instruction& i, Position at);
  void Age(const Instruction& i, Position at);
  bool IsView(const Instruction& i) const;
  void RunZeroGrad(const Instruction& i, Position at);
  void Bind(const Instruction& i, Position at);
  void Free(BufferId buffer, const std::vector<std::int32_t>& parts, const std::vector<StreamId>& safe_after,
            Position at);
  void Release(BufferId grad, Position at);
  void ReadParameters(UnitId unit, const Work& work, bool evaluates);
  Work Issue(const Instruction& i, Position at) {
    return clocks_.Issue(i.stream < 0 ? clocks_.host() : i.stream, at);
  }
  bool IsSingleRank(UnitId unit) const;
  // Reports what CheckCycle finds of one buffer; `first_step`: the first of the steps that repeat, as run.
  bool CheckBuffer(BufferId buffer, const BufferState& before, const BufferState& after,
                   std::int32_t first_step);

  const Plan& plan_;
  Reporter& reporter_;
  Words words_;
  Clocks clocks_;
  Memory memory_;
  Gradients gradients_;
  Compute compute_;
  Exchanges exchanges_;
  GradBuffers grad_buffers_;
  Activations activations_;
  std::vector<BufferId> bound_;  // by unit: the buffer its parameters are views of; -1: sharded
  std::vector<Position> bound_at_;
  // By unit: its param_sharded, optimizer_state and final gradient buffers, and those for other parameters.
  std::vector<std::vector<BufferId>> unit_shards_, unit_states_, unit_grads_, unit_copies_;
  bool leaves_over_ = false;
  bool resets_ = false;                // the trigger is FSDP2's reset_iter_state
  std::vector<BufferId> temporaries_;  // the optimizer's
  std::vector<char> needs_binding_;    // by unit: its segments read an unsharded buffer, not the shard itself
};

}  // namespace shardplan::verifier
