// SPDX-License-Identifier: Apache-2.0
// Gradients in memory, from the segment that makes them to the optimizer: the effect of instructions on the
// state (see [Note: gradients move] in state.h). At each of them the gradient rules are asked (rules.h).
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"
#include "verifier/memory.h"
#include "verifier/state.h"
#include "verifier/words/words.h"

namespace shardplan::verifier {

class Gradients {
 public:
  Gradients(const Plan& plan, const Memory& memory, Words& words);

  // A segment makes, or adds to, one parameter's gradient in `buffer`.
  void Make(const SegmentGrad& grad, BufferId buffer, Position at);
  // grad_copy_in, reduce_scatter, grad_cast, grad_accumulate, copy_to_host: src's value goes to dst.
  void Move(const Instruction& instruction, Position at);
  // grad_zero: each parameter of `buffer` has a gradient of zeros.
  void Zero(BufferId buffer, Position at);
  // grad_scale, all_reduce: in place.
  void Change(const Instruction& instruction, Position at);
  // `buffer` is about to be freed: a final gradient (grad_sharded, grad_host) may go, after a last look.
  void Release(BufferId buffer, Position at);
  // Nobody wants what `buffer` holds.
  void Discard(BufferId buffer) { At(buffer) = {}; }
  // The memory in `slot` that was `buffer` is gone.
  void Drop(std::int32_t slot, BufferId buffer, Position at);
  // The optimizer reads the gradients in `buffer`.
  void Consume(BufferId buffer, Position at);
  // ... and steps with it those of the parameters that have a gradient: these.
  std::vector<std::int32_t> Step(BufferId buffer, const std::vector<std::int32_t>& parameters, Position at);
  // At an optimizer step of `unit` (-1: all): gradients of it that are still on their way.
  void CheckNoneUnreduced(UnitId unit, Position at);

  // The buffer held a gradient that has moved on.
  bool IsUsedUp(BufferId buffer) const;
  // How often each parameter's gradient is in the buffer (-1: zeros alone), empty when none is; to compare
  // two moments.
  std::vector<std::int32_t> Contributions(BufferId buffer) const;

 private:
  Gradient& At(BufferId buffer);
  Gradient NothingOf(UnitId unit) const;
  // The parameters of `unit` that the buffer holds: all, where it is of no unit.
  std::vector<std::int32_t> HeldOf(BufferId buffer, UnitId unit) const;
  bool IsForeign(const Gradient& value, const Instruction& instruction) const;
  void Reduce(Gradient& value, const Instruction& instruction, Position at);
  Gradient Select(Gradient& source, const Instruction& instruction, Position at);
  bool JoinOther(Gradient& into, const Gradient& value) const;
  bool AddsToAverage(const Gradient& into, const Gradient& value) const;
  void Accumulate(Gradient& into, const Gradient& value, BufferId dst, Position at);
  void CheckReduced(Gradient& value, BufferId buffer, Position at);

  const Plan& plan_;
  const Memory& memory_;
  Words& words_;
  std::vector<Gradient> values_;  // by memory slot
  bool steps_ = false;            // the user's calls step an optimizer ...
  bool may_step_again_ = false;   // ... more than once in a step
};

}  // namespace shardplan::verifier
