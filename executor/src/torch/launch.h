// SPDX-License-Identifier: Apache-2.0
// A process as a rank: what its launcher (torchrun, shardplan run, a script) has set in the environment, and
// the store at which the ranks meet.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "shardplan/schemas/error.h"

namespace shardplan::executor {

struct RankEnvironment {
  std::int64_t rank = 0;                     // RANK
  std::int64_t world_size = 1;               // WORLD_SIZE
  std::int64_t local_rank = 0;               // LOCAL_RANK, else the rank
  std::string master_address = "127.0.0.1";  // MASTER_ADDR
  std::uint16_t master_port = 29500;         // MASTER_PORT
  bool started_here = false;                 // by `shardplan run`, as all ranks: SHARDPLAN_RUN_CHILD
  bool store_is_served = false;              // by the launcher; otherwise rank 0 serves it
  std::optional<std::string> restart = {};   // TORCHELASTIC_RESTART_COUNT: an attempt has keys of its own
};

// Nothing where RANK or WORLD_SIZE is not set. kUsage: a variable is no number, or the rank is not in the
// world.
Result<std::optional<RankEnvironment>> ReadRankEnvironment();

// The store of the environment, which rank 0 serves unless the launcher does: on the loopback interface where
// MASTER_ADDR is of it, else on all. kEnvironment: it cannot be reached within the timeout.
Result<c10::intrusive_ptr<c10d::Store>> MeetAtStore(const RankEnvironment& environment,
                                                    std::chrono::milliseconds timeout);

// Does this rank's process serve the store?
bool ServesStore(const RankEnvironment& environment);
// Is `host` this machine's loopback interface?
bool IsLoopback(const std::string& host);

// Serves a store on 127.0.0.1, at any free port, for ranks that this process starts.
Result<c10::intrusive_ptr<c10d::TCPStore>> ServeStore();

}  // namespace shardplan::executor
