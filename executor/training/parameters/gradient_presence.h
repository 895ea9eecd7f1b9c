// SPDX-License-Identifier: Apache-2.0
// Which gradients do the ranks have? Beside the plan each may have others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// Every function is collective and throws what LibTorch does.
class GradientPresence {
 public:
  // groups: by CommunicatorId. `plan` outlives this.
  GradientPresence(const Plan& plan, std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups)
      : plan_(plan), groups_(std::move(groups)) {}

  // `mine` of this rank, or'ed over all ranks that reduce the unit's gradients.
  std::vector<bool> AnyRank(UnitId unit, const std::vector<bool>& mine) const;
  // Is `number` the same on all these ranks?
  bool Alike(std::int64_t number) const;
  // The same of flags by unit, over the ranks of the first unit that is spread over any.
  std::vector<bool> AnyRankByUnit(const std::vector<bool>& mine) const;

 private:
  // Over the ranks that reduce the unit's gradients, on the CPU.
  at::Tensor Largest(const Unit& unit, at::Tensor numbers) const;
  // The first unit that is spread over ranks; null: none is.
  const Unit* FirstSpread() const;

  const Plan& plan_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

}  // namespace shardplan::executor
