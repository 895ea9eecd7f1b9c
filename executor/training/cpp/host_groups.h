// SPDX-License-Identifier: Apache-2.0
// Sums over the ranks of a plan's communicators in host memory, beside the plan: norms, flags.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/peers.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

class HostGroups {
 public:
  // groups: by CommunicatorId, null where a communicator is one rank. world: of all ranks; null: there is
  // one. peers: who is alive; may be null.
  HostGroups(std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
             c10::intrusive_ptr<c10d::ProcessGroup> world, std::shared_ptr<Peers> peers)
      : groups_(std::move(groups)), world_(std::move(world)), peers_(std::move(peers)) {}

  enum class Operation : std::uint8_t { kSum, kMax };
  // Throw TrainingError, which names a rank that died or is stopped.
  // `values` of all ranks of this rank's group of the communicator (-1: of this rank alone), in host memory.
  at::Tensor Reduce(const at::Tensor& values, CommunicatorId communicator, Operation operation) const;
  // ... of all ranks.
  at::Tensor ReduceAll(const at::Tensor& values, Operation operation) const;

 private:
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  c10::intrusive_ptr<c10d::ProcessGroup> world_;
  std::shared_ptr<Peers> peers_;

  at::Tensor Reduced(const at::Tensor& values, c10d::ProcessGroup* group, Operation operation) const;
};

}  // namespace shardplan::executor
