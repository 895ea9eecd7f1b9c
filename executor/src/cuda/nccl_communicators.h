// SPDX-License-Identifier: Apache-2.0
// The NCCL communicators of a plan: made without blocking, split from the world's, aborted or ended together.
#pragma once

#include <nccl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "shardplan/executor/backends.h"

namespace shardplan::executor {

class NcclCommunicators {
 public:
  // Both outlive it.
  NcclCommunicators(CudaDevice& device, const NcclOptions& options) : device_(device), options_(options) {}

  void Prepare(const Plan& plan, std::int64_t rank);
  // Does nothing when it is there. All ranks have to come, in the same order for all communicators.
  Status Make(CommunicatorId id);
  ncclComm_t operator[](CommunicatorId id) const { return communicators_[id]; }

  // Polls until the last call on the communicator is done. `what`, for the error, is being done.
  Status WaitUntilReady(ncclComm_t communicator, const char* what);
  // An error that one of them had in the background.
  std::optional<std::string> IsBroken() const;
  void Abort();
  // Ends them in order. Nothing is in flight.
  void Destroy();

 private:
  Status MakeWorld();
  void RegisterArena(ncclComm_t communicator);
  void DestroyOne(ncclComm_t communicator);

  CudaDevice& device_;
  const NcclOptions& options_;
  const Plan* plan_ = nullptr;
  std::int64_t rank_ = 0;
  ncclComm_t world_ = nullptr;
  std::vector<ncclComm_t> communicators_;                 // by CommunicatorId; null: no collective is on it
  std::vector<std::pair<ncclComm_t, void*>> registered_;  // handles of the arena
};

}  // namespace shardplan::executor
