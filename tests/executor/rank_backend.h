// SPDX-License-Identifier: Apache-2.0
// The interface of a backend with a process for each rank, for the conformance suite. A test program links
// one of cpu_rank_backend.cc and cuda_rank_backend.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"

namespace shardplan::test {

// One rank's side of one run.
struct RankBackend {
  std::unique_ptr<executor::TorchDevice> device;
  std::unique_ptr<executor::Collectives> collectives;  // ends before the device
};

class RankBackends {
 public:
  virtual ~RankBackends() = default;
  // `name`: of the run, the same on all ranks.
  virtual Result<RankBackend> Make(const Plan& plan, executor::MemorySource memory,
                                   const std::string& name) = 0;
};

// In a process of the rank's own. The ranks meet at the file, which does not exist before.
// peers: which ranks are alive, as jobs have them.
std::unique_ptr<RankBackends> MakeRankBackends(std::int64_t rank, std::int64_t ranks, const std::string& file,
                                               std::shared_ptr<executor::Peers> peers = nullptr);
// "cpu", "cuda".
std::string BackendName();
// Why this machine cannot run the backend; "": it can. In a process of its own: to ask begins to use a GPU,
// which no process that is forked afterwards could.
std::string WhyNot();

}  // namespace shardplan::test
