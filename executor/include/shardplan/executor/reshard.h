// SPDX-License-Identifier: Apache-2.0
// Executes a plan of resharding on real ranks (docs/reference/reshard-format.md), round by round:
//
//   const Plan world = ExchangePlan(ranks);            // what device and collectives are prepared with
//   device->Prepare(world);
//   collectives->Prepare(world, rank);
//   ExecuteReshard(plan, rank, *device, *collectives, source, target, {.store = store});
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan::executor {

// A plan without steps whose communicator 0 is all ranks.
Plan ExchangePlan(std::int64_t ranks);

// This rank's storage of a tensor, or of the flat buffer that it lies in: contiguous, of any dtype, in the
// device's memory or the host's. Asked for once of each tensor.
using ReshardStorage = std::function<at::Tensor(const StateTensor& tensor)>;

struct ReshardMoved {
  std::int64_t rounds = 0;
  std::int64_t sent_bytes = 0;  // of this rank
  std::int64_t received_bytes = 0;
  std::int64_t kept_bytes = 0;     // that stayed on it
  std::int64_t staging_bytes = 0;  // the most at once; at most the plan's budget
};

struct ReshardRun {
  c10::intrusive_ptr<c10d::Store> store =
      nullptr;                             // that all ranks share, for this resharding alone; one rank: null
  std::shared_ptr<Peers> peers = nullptr;  // which of them are alive; null: nobody knows
  std::chrono::milliseconds timeout{600'000};
  bool verify = true;  // the first rank proves the plan for all
  // After each round: what this rank has moved, and will have moved in all.
  std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)> progress = {};
};

// Rank r is rank r of both layouts, where they have so many. `source` is asked on ranks of the source,
// `target` on those of the target; they may share no memory. What the plan does not write stays as it is.
// Before the first byte all ranks compare the plan, and after the last one whether all came to the end: so
// either every rank has its bytes, or every rank has an error, within the timeout. kNegative: the ranks have
// different plans, or one cannot take part (the plan does not verify or is of another number of ranks, a
// storage is too small: its own words). kEnvironment: a rank died, failed or did not come.
// What fails once copies move aborts `collectives`: no other work of theirs can follow.
Result<ReshardMoved> ExecuteReshard(const ReshardPlan& plan, std::int64_t rank, TorchDevice& device,
                                    Collectives& collectives, const ReshardStorage& source,
                                    const ReshardStorage& target, const ReshardRun& run);

}  // namespace shardplan::executor
