// SPDX-License-Identifier: Apache-2.0
// The collectives of several ranks: which groups they form, in which order each rank issues them, and whether
// they can all finish.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"

namespace shardplan::verifier {

// One communicator of one group of ranks: its name, the size and stride of the digits that its ranks differ
// in, the most significant first, and the group's first rank.
using GroupKey = std::tuple<std::string, std::vector<std::pair<std::int64_t, std::int64_t>>, std::int64_t>;

// A collective as one rank issues it.
struct CollectiveCall {
  Position at;
  std::int32_t group = -1;  // index into RankPrograms::groups
  std::int32_t number = 0;  // 0, 1, ... on this group's communicator
  CollectiveKind kind = CollectiveKind::kAllGather;
  ReduceOp reduce_op = ReduceOp::kSum;
  double divisor = 1;
  DType dtype = DType::kFloat32;
  Bytes size_bytes;                    // of the full tensor: all ranks must agree
  const Exchange* exchange = nullptr;  // of an all_to_all: who owns what, on which all ranks agree
  // One of the model's own, inside a segment: its number there, and what it says. A send and its receive are
  // one call of each rank.
  std::int32_t entry = -1;
  std::int32_t work = -1, peer = -1, batch = -1;
};

// The collectives of all ranks over the same number of steps: all of a plan's steps and its cycle once more.
struct RankPrograms {
  explicit RankPrograms(const std::vector<Plan>& plans);

  const std::vector<Plan>& plans;
  std::vector<std::vector<std::int32_t>> steps;  // by rank: indices of the steps, in execution order
  std::vector<GroupKey> groups;
  std::vector<std::vector<CollectiveCall>> calls;                // by rank, in host order
  std::vector<std::vector<std::vector<std::int32_t>>> by_group;  // by rank, group: indices into calls[rank]

  std::vector<std::int64_t> Members(std::int32_t group) const;  // ascending
};

// The rule collective_order: where a rank's calls on a communicator first differ from those of the group's
// first rank. At that number one of the two may have no call.
struct OrderFault {
  std::int32_t group = -1;
  std::int64_t first = 0;  // the group's first rank
  std::int64_t rank = 0;   // the one that differs
  std::size_t number = 0;  // of the call on the group's communicator
};
std::vector<OrderFault> CollectiveOrder(const RankPrograms& programs);

// Who waits for whom in a circle, or for what never happens.
struct WaitLink {
  enum class For : std::uint8_t { kStream, kRank, kHost } kind = For::kStream;
  std::int64_t rank = 0;
  Position at;              // what cannot start; kHost: what the rank's host is still at
  std::int64_t target = 0;  // kStream: the stream of the same rank that it waits for; kRank: the rank
};
// The rule deadlock, of several ranks: runs them all together, streams as queues; the programs are such that
// what can go on will, so that one run decides. The first circle found, empty if all ranks finish.
std::vector<WaitLink> DeadlockOfRanks(const RankPrograms& programs);

}  // namespace shardplan::verifier
