// SPDX-License-Identifier: Apache-2.0
// Starts the local ranks of a run and watches them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace shardplan::run {

// Starts this program again `ranks` times with `arguments`, torchrun's environment variables set, and serves
// the store they meet at. Returns the exit code: 0 when all ranks are done, else the first failing rank's (4
// when it was killed). After one fails, the others have timeout_s to notice by themselves. SIGTERM, SIGINT,
// SIGHUP and SIGQUIT are passed on to the ranks, and the exit code is 128 and the signal's number.
int LaunchRanks(const std::vector<std::string>& arguments, std::int64_t ranks, std::int64_t timeout_s);

}  // namespace shardplan::run
