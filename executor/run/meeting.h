// SPDX-License-Identifier: Apache-2.0
// The store that the ranks of a run meet at.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "options.h"

namespace shardplan::run {

// Serves a store on 127.0.0.1, at any free port. Throws.
c10::intrusive_ptr<c10d::TCPStore> ServeStore();

// The store of the rank's environment, which rank 0 serves unless the launcher does: on the loopback
// interface where MASTER_ADDR is of it, else on all. Throws where it cannot be reached within the timeout.
c10::intrusive_ptr<c10d::Store> Connect(const RunOptions& options, const RankEnvironment& environment);

// Does this rank's process serve the store?
bool ServesStore(const RankEnvironment& environment);

// Is `host` this machine's loopback interface?
bool IsLoopback(const std::string& host);

}  // namespace shardplan::run
