// The reductions of a fallback: gradients reduced without the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::python {

// [Note: fallback]
// A fallback finishes a step that deviated from its plan, when all ranks deviate alike: units are gathered
// when they are entered, forward and backward, as in evaluation, and gradients are reduced here, one unit
// after the other, nothing overlapping. The sums are the plan's but for the order of roundings.
class FallbackReduction {
 public:
  // groups: by CommunicatorId. `plan` outlives this.
  FallbackReduction(const Plan& plan, std::int64_t rank,
                    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups)
      : plan_(plan), rank_(rank), groups_(std::move(groups)) {}

  // grads: by parameter of the unit, undefined where this rank has none. Returns the reduced pieces in the
  // shape and dtype of the rank's shards, undefined where no rank has a gradient. Collective; throws what
  // LibTorch does.
  std::vector<at::Tensor> Reduce(UnitId unit, const std::vector<at::Tensor>& grads) const;
  // The same for a flat unit, whose gradients stay where they are computed: this rank's slice of the flat
  // gradient, 1-D, in the dtype of its shard.
  at::Tensor ReduceFlat(UnitId unit, const std::vector<at::Tensor>& grads, c10::Device device) const;
  // Of which units does any rank have gradients left? `mine`: this rank's. Collective.
  std::vector<bool> AnyRank(const std::vector<bool>& mine) const;

 private:
  void SumOver(CommunicatorId communicator, at::Tensor& tensor, bool maximum) const;
  // Sums [ranks, elements of one] over all ranks and divides: this rank's row.
  at::Tensor ReducePieces(const Unit& unit, const at::Tensor& pieces) const;
  std::vector<bool> AnyRankOf(const Unit& unit, const std::vector<bool>& mine) const;

  const Plan& plan_;
  const std::int64_t rank_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

}  // namespace shardplan::python
