// SPDX-License-Identifier: Apache-2.0
// Processes of this machine as the ranks of a run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardplan::test {

// Writes a line to what all ranks share, in one piece.
using Log = std::function<void(const std::string& line)>;

struct ForkedRun {
  std::vector<std::string> lines;   // in the order of writing
  std::vector<std::string> faults;  // of each rank that was killed by a signal or whose work is false
};

// Runs `work(rank, log)` in `ranks` forked processes at once. After the first fault the other ranks have
// `patience_s` to find out by themselves; then they are killed. The caller has used neither threads nor a
// GPU.
ForkedRun RunForked(std::int64_t ranks, int patience_s,
                    const std::function<bool(std::int64_t rank, const Log& log)>& work);

}  // namespace shardplan::test
