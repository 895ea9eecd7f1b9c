// What each piece of memory holds of which gradients, from the segment that makes them to the optimizer:
// reduced exactly once over the right ranks, divided once by the right number, nothing lost on the way.
//
// [Note: gradients move]
// A gradient is a value that moves: grad_copy_in, reduce_scatter, grad_cast, grad_accumulate and copy_to_host
// leave a value in dst and a used-up one in src. Using a used-up value again counts a gradient twice;
// dropping one that is not used up loses it.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/verifier_clocks.h"
#include "verifier/verifier_memory.h"
#include "verifier/verifier_report.h"

namespace shardplan::verifier {

class Gradients {
 public:
  Gradients(const Plan& plan, Memory& memory, Reporter& reporter);

  // A segment makes, or adds to, one parameter's gradient in `buffer`.
  void Make(const SegmentGrad& grad, BufferId buffer, Position at);
  // grad_copy_in, reduce_scatter, grad_cast, grad_accumulate, copy_to_host: src's value goes to dst.
  void Move(const Instruction& instruction, Position at);
  // grad_scale, all_reduce: in place.
  void Change(const Instruction& instruction, Position at);
  // `buffer` is about to be freed: a final gradient (grad_sharded, grad_host) may go, after a last look.
  void Release(BufferId buffer, Position at);
  // The memory in `slot` that was `buffer` is gone.
  void Drop(std::int32_t slot, BufferId buffer, Position at);
  // The optimizer reads the gradients in `buffer`.
  void Consume(BufferId buffer, Position at);
  // At an optimizer step of `unit` (-1: all): gradients of it that are still on their way.
  void CheckNoneUnreduced(UnitId unit, Position at);

  // The buffer held a gradient that has moved on.
  bool IsUsedUp(BufferId buffer) const;
  // How often each parameter's gradient is in the buffer, empty when none is; to compare two moments.
  std::vector<std::int32_t> Contributions(BufferId buffer) const;

 private:
  struct Value {
    UnitId unit = -1;                 // -1: no gradient
    std::vector<std::int32_t> count;  // per parameter of the unit: gradients of how many segments are summed
    bool used_up = false;
    bool sharded = false;     // reduce-scattered
    bool replicated = false;  // all-reduced over the replicas
    bool checked = false;     // its divisor was found right or reported
    double divisor = 1.0;
    std::vector<Position> history;
  };

  Value& At(BufferId buffer);
  std::vector<std::int32_t> ParametersOf(BufferId buffer, UnitId unit) const;
  bool IsForeign(const Unit& unit, const Instruction& instruction) const;
  void Reduce(Value& value, const Instruction& instruction, Position at);
  void CheckMade(const Value& value, const std::vector<std::int32_t>& parameters, BufferId buffer,
                 Position at);
  bool JoinOther(Value& into, const Value& value) const;
  bool AddsToAverage(const Value& into, const Value& value) const;
  void Accumulate(Value& into, const Value& value, BufferId dst, Position at);
  void Overwrite(Value& old, BufferId dst, Position at);
  Value Select(Value& source, const Instruction& instruction, Position at);
  void CheckReduced(Value& value, BufferId buffer, Position at);
  void CheckDivisor(Value& value, BufferId buffer, Position at);
  double ExpectedDivisor(const Unit& unit) const;
  std::vector<std::string> Chain(const Value& value, Position at) const;

  const Plan& plan_;
  Memory& memory_;
  Reporter& reporter_;
  std::vector<Value> values_;  // by memory slot
};

}  // namespace shardplan::verifier
