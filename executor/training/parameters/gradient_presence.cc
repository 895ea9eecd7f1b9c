// SPDX-License-Identifier: Apache-2.0
#include "training/parameters/gradient_presence.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace shardplan::executor {

at::Tensor GradientPresence::Largest(const Unit& unit, at::Tensor numbers) const {
  for (const CommunicatorId group : {unit.shard_communicator, unit.replicate_communicator}) {
    if (group < 0 || plan_.communicators[group].size == 1) continue;
    numbers = numbers.to(groups_[group]->getBoundDeviceId().value_or(at::kCPU));
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> tensors = {numbers};
    groups_[group]->allreduce(tensors, options)->wait();
  }
  return numbers.cpu();
}

std::vector<bool> GradientPresence::AnyRank(UnitId id, const std::vector<bool>& mine) const {
  at::Tensor flags = at::zeros({static_cast<std::int64_t>(mine.size())}, at::kInt);
  for (std::size_t i = 0; i < mine.size(); ++i) flags[static_cast<std::int64_t>(i)] = mine[i] ? 1 : 0;
  flags = Largest(plan_.units[id], std::move(flags));
  std::vector<bool> any(mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) any[i] = flags[static_cast<std::int64_t>(i)].item<int>() != 0;
  return any;
}

const Unit* GradientPresence::FirstSpread() const {
  const auto spread = std::ranges::find_if(plan_.units, [](const Unit& unit) {
    return unit.shard_communicator >= 0 || unit.replicate_communicator >= 0;
  });
  return spread == plan_.units.end() ? nullptr : &*spread;
}

bool GradientPresence::Alike(std::int64_t number) const {
  const Unit* spread = FirstSpread();
  if (spread == nullptr) return true;
  const at::Tensor largest = Largest(*spread, at::tensor({number, -number}, at::kLong));
  return largest[0].item<std::int64_t>() == -largest[1].item<std::int64_t>();
}

std::vector<bool> GradientPresence::AnyRankByUnit(const std::vector<bool>& mine) const {
  const Unit* spread = FirstSpread();
  if (spread == nullptr) return mine;
  return AnyRank(static_cast<UnitId>(spread - plan_.units.data()), mine);
}

}  // namespace shardplan::executor
