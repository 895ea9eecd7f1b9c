// SPDX-License-Identifier: Apache-2.0
// Saves and loads the state of a training job as checkpoints (docs/guide/checkpoints.md), at once or while
// training goes on:
//
//   Session session({.rank = rank, .ranks = ranks, .store = store});
//   session.SaveInBackground("step_1000", StateOfRank(layout, rank, storage), {});   // between two steps
//   ...                                                                              // training
//   session.HoldBack();   // before the optimizer's next step: the copies see no change
//   session.Wait();       // the folder has its name, or the error
//   session.Load("step_1000", other_layout, storage);     // on other ranks, in another layout
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan::executor {

// Executes a plan of resharding on real ranks (docs/reference/reshard-format.md), round by round:
//
//   const Plan world = ExchangePlan(ranks);            // what device and collectives are prepared with
//   device->Prepare(world);
//   collectives->Prepare(world, rank);
//   ExecuteReshard(plan, rank, *device, *collectives, source, target, {.store = store});
//
// ExchangePlan: a plan without steps whose communicator 0 is all ranks.
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
// `target` on those of the target; they may share no memory. Bytes that the plan does not write stay as they
// are. Before the first byte all ranks compare the plan, and after the last one whether all came to the end:
// so either every rank has its bytes, or every rank has an error, within the timeout. kNegative: the ranks
// have different plans, or one cannot take part (its own words: the plan does not verify, is of another
// number of ranks, a storage is too small). kEnvironment: a rank died, failed or did not come. A failure once
// copies move aborts `collectives`: no other work of theirs can follow.
Result<ReshardMoved> ExecuteReshard(const ReshardPlan& plan, std::int64_t rank, TorchDevice& device,
                                    Collectives& collectives, const ReshardStorage& source,
                                    const ReshardStorage& target, const ReshardRun& run);

struct SessionOptions {
  std::int64_t rank = 0;
  std::int64_t ranks = 1;
  c10::intrusive_ptr<c10d::Store> store =
      nullptr;                                 // that all ranks share, for this session alone; one rank: null
  std::shared_ptr<Peers> peers = nullptr;      // which of them are alive; null: nobody knows
  std::chrono::milliseconds timeout{600'000};  // for the slowest rank's part of a save
};

// The part of a state that one rank holds.
struct SessionState {
  StateDescription description;   // the same on all ranks
  std::vector<at::Tensor> boxes;  // of each of this rank's boxes, in their order: its elements, contiguous
};
// The parts of one rank of a layout; `storage` as for a resharding.
Result<SessionState> StateOfRank(const StateLayout& layout, std::int64_t rank, const ReshardStorage& storage);

struct SaveFigures {
  std::int64_t bytes = 0;     // that this rank wrote
  std::int64_t held_ns = 0;   // for which the caller was held
  std::int64_t saved_ns = 0;  // until the folder had its name
};

struct SaveOptions {
  bool replaces = false;  // a checkpoint that is there; until the end it is
};

// Every function but HoldBack, IsSaving and figures is called on all ranks, in the same order. An error is
// one of all ranks. kNegative: another rank's, in its words; kEnvironment: a rank died or did not come within
// the timeout.
class Session {
 public:
  explicit Session(SessionOptions options);
  ~Session();  // waits for a save that is under way
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Status Save(const std::string& path, SessionState state, const SaveOptions& options);
  // Copies the state to host memory (pinned, of a device with streams, and on a stream of its own), and
  // writes it in a thread. A save before this one is waited for; its error is this call's.
  Status SaveInBackground(const std::string& path, SessionState state, const SaveOptions& options);
  // Until what is under way has its name, or failed. Its error is reported once.
  Status Wait();

  // Holds back the current stream of the device that is copied from: work issued from now on runs after the
  // copies.
  void HoldBack();
  // Whether this rank's thread is still busy.
  bool IsSaving() const;
  // Figures of the last save that has finished.
  SaveFigures figures() const;

  // Any checkpoint, whatever ranks and layout wrote it: each rank reads what it holds. kBadInput: a tensor is
  // not there, or of another shape or dtype.
  Status Load(const std::string& path, const StateLayout& layout, const ReshardStorage& storage);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace shardplan::executor
