// SPDX-License-Identifier: Apache-2.0
// Saves and loads the state of a training job as checkpoints (docs/guide/checkpoints.md), at once or while
// training goes on:
//
//   Session session({.rank = rank, .ranks = ranks, .store = store});
//   session.SaveInBackground("step_1000", StateOfRank(layout, rank, storage), {});   // between two steps
//   ...                                                                              // training
//   session.HoldBack();              // before the optimizer's next step: what is being copied is not to
//   change session.Wait();                  // the folder has its name, or the error
//   session.Load("step_1000", other_layout, storage);     // on other ranks, in another layout
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/checkpoints/state_checkpoint.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/reshard.h"
#include "shardplan/schemas/error.h"

namespace shardplan::executor {

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
