// SPDX-License-Identifier: Apache-2.0
// The gradients that the backward makes of a group's unsharded parameters, until they are reduced (the
// gradient side of FSDPParam in _fsdp_param.py).
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "policy/fsdp2/unit_scope.h"

namespace shardplan::fsdp2 {

class UnshardedGrads {
 public:
  struct State {
    // Parameters whose _unsharded_param.grad is alive, in the dtype of the unsharded parameters. Added by the
    // backward (Add), taken by FsdpParamGroup::PostBackward.
    std::set<std::int32_t> grads;
    // Parameters whose unsharded_accumulated_grad is alive, in the reduce dtype, a buffer each. Added by
    // ToAccumulatedIfNeeded, taken by FsdpParamGroup::PostBackward.
    std::set<std::int32_t> accumulated;
    bool operator==(const State&) const = default;
  };
  // Gradients that are to be reduced, no longer the parameters' own.
  struct Taken {
    std::vector<std::int32_t> parameters;  // ascending
    std::vector<BufferId> buffers;
  };

  explicit UnshardedGrads(const UnitScope& scope) : scope_(scope) {}

  // The backward has made a gradient of this parameter. False: there is one, to which it is added.
  bool Add(std::int32_t parameter) { return state_.grads.insert(parameter).second; }
  // FSDPParam.accumulate_unsharded_grad_if_needed.
  void AccumulateIfNeeded();
  // FSDPParam.to_accumulated_grad_if_needed.
  void ToAccumulatedIfNeeded();
  bool HasGrads() const { return !state_.grads.empty() || !state_.accumulated.empty(); }
  // Some are in one dtype and some in the other.
  bool HasTwoDTypes() const { return !state_.grads.empty() && !state_.accumulated.empty(); }
  // Parameters of `zeros` that have none take part with zeros: in the dtype that the unit computes in, or in
  // that of accumulated gradients.
  Taken Take(const std::set<std::int32_t>& zeros, bool zeros_are_accumulated);
  // Nobody reduces them.
  void Discard();
  // The gradients that are there, with memory, when a procedure begins.
  void Restore(State state) { state_ = std::move(state); }

  const State& state() const { return state_; }

 private:
  DType GradDType(std::int32_t parameter, bool accumulated) const;
  BufferId GradBuffer(const std::set<std::int32_t>& parameters, bool accumulated) const;
  std::vector<BufferId> TakeBuffers(std::set<std::int32_t> grads, bool accumulated) const;
  std::vector<BufferId> MakeZeros(const std::set<std::int32_t>& parameters, bool accumulated) const;
  std::vector<BufferId> ReducePartialGrads(std::set<std::int32_t>& grads, bool accumulated) const;

  const UnitScope& scope_;
  State state_;
};

}  // namespace shardplan::fsdp2
