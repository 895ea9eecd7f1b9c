// SPDX-License-Identifier: Apache-2.0
// Parses the output of the programs of nccl-tests (https://github.com/NVIDIA/nccl-tests, src/util.cu and
// src/common.cu, 2.10 to 2.19.6).
//
// [Note: what a run of nccl-tests says]
//
//   # Collective test starting: all_reduce_perf                            in new releases
//   # nThread 1 nGpus 8 minBytes 16777216 ...
//   #  Rank  0 Group  0 Pid 1001 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
//   #                                               out-of-place                   in-place
//   #       size     count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
//       16777216   4194304  float    sum    -1  250.0  67.11 117.44      0  250.0  67.11 117.44      0
//
// `size` is the whole tensor of every kind: what is gathered, what is reduced, what a rank sends. `redop` and
// `root` may be blank or missing in old releases, so cells are counted from the right, where the head says
// what there is. Devices are one line for each rank, however many a process or a thread has; lines beyond 2
// KiB of a process are cut, and people cut them. The bandwidths say the number of ranks again: busbw / algbw
// is (n - 1) / n, twice that of an all_reduce, 1 of a sendrecv, a broadcast and a reduce. A list that is not
// whole is completed by it, a kind that the text does not have is refused by it.
#pragma once

#include <optional>
#include <string_view>

#include "shardplan/simulator/measurements.h"

namespace shardplan::internal {

// Whether a text has the head of such a table.
bool IsNcclTests(std::string_view text);

// The collective of a program: "all_reduce" for all_reduce_perf. Nothing: none that has a cost.
std::optional<CollectiveKind> KindOfProgram(std::string_view name);

// The rows of all runs in a text, one for each line of a table. kBadInput says the line as "/line/N".
Result<Measurements> ReadNcclTests(std::string_view text, const ReadOptions& options);

}  // namespace shardplan::internal
