// SPDX-License-Identifier: Apache-2.0
// Collectives: all_gather, reduce_scatter, all_reduce and all_to_all on the communicators of a plan, and
// exchanges of bytes, for one rank.
//
// [Note: a failing rank never leaves the others hanging]
// A collective that does not finish within the timeout fails on every rank that takes part in it, and
// everything issued later fails at once. Ranks tell each other how far they came through a side channel (a
// store), so that the error names the ranks that did not arrive.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

struct SentElements {
  std::int64_t first = 0;
  std::int64_t numel = 0;
  bool operator==(const SentElements&) const = default;
};

// One collective of the program, on part 0 of its buffers. Offsets and counts are in elements.
//   all_gather:     slot_numel elements from src at src_offset; every rank's, in the order of the group's
//   ranks, to
//                   dst at 0. src == dst: in place.
//   reduce_scatter: group size x slot_numel elements of src; this rank's slot, reduced, to dst at 0.
//   all_reduce:     slot_numel elements of src in place (dst == src).
//   all_to_all:     `sends` of src, one for each rank of the group; receive_numel[r] elements from rank r to
//                   dst, one behind the other from 0 on. What is behind them in dst stays as it is.
//                   slot_numel is 0.
struct CollectiveSpec {
  CollectiveKind kind = CollectiveKind::kAllGather;
  CommunicatorId communicator = -1;
  BufferId src = -1;
  BufferId dst = -1;
  std::int64_t src_offset = 0;
  std::int64_t slot_numel = 0;
  DType dtype = DType::kFloat32;
  ReduceOp reduce_op = ReduceOp::kSum;
  double divisor = 1.0;                  // of a sum: inputs are multiplied by 1 / divisor
  std::vector<SentElements> sends = {};  // of an all_to_all, by rank of the group
  std::vector<std::int64_t> receive_numel = {};
  bool operator==(const CollectiveSpec&) const = default;
};

using CollectiveId = std::int32_t;

// Bytes between the ranks of a communicator, in the device's memory: what goes to each rank of the group, by
// its position there, and what comes from it. The two ranks of a pair give the same number. A rank's own
// entries are empty.
struct ByteExchange {
  CommunicatorId communicator = -1;
  std::vector<std::span<std::byte>> send;
  std::vector<std::span<std::byte>> receive;
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  // Called by Replayer::Create, once for the plan and then once for each collective of the program, in the
  // same order on every rank.
  virtual Status Prepare(const Plan& plan, std::int64_t rank) = 0;
  virtual Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) = 0;

  // Issues it on the stream; does not wait. kEnvironment when an earlier one has failed or timed out
  // (`message` says which ranks did not arrive).
  virtual Status Issue(CollectiveId collective, StreamId stream) = 0;
  // Around several Issues that follow one another, on one stream and communicator, none of which needs what
  // another one does: a backend may launch them as one. After an error of Issue the group is over.
  virtual Status BeginGroup() { return {}; }
  virtual Status EndGroup() { return {}; }
  // Whether it does: then nothing of a group is on the stream before its end.
  virtual bool LaunchesGroups() const { return false; }
  // Issues it on the stream, which has what comes when it gets past it. Every rank of the group calls it,
  // also one that neither sends nor receives. Errors as of Issue. kUsage: this backend moves no bytes between
  // ranks.
  virtual Status Exchange(const ByteExchange& exchange, StreamId stream);
  // The error of anything issued so far that has failed, without waiting.
  virtual Status Check() = 0;
  // By communicator, how many were issued. Empty: the backend does not count them.
  virtual std::vector<std::int64_t> Issued() const { return {}; }
  // Everything in flight fails, here and, as far as the backend can, on the other ranks. `reason` is passed
  // on.
  virtual void Abort(const std::string& reason) = 0;
};

// kBadInput with a pointer into the plan: a communicator whose groups are not all there on the plan's ranks.
// The functions below need communicators that passed.
Status CheckCommunicators(const Plan& plan);

// Position of `rank` in its group, and the group's ranks in that order: those that differ from it only in the
// digit (rank / stride) mod size, or in the digits of `dims`.
std::int64_t RankInGroup(const Communicator& communicator, std::int64_t rank);
std::vector<std::int64_t> GroupOf(const Communicator& communicator, std::int64_t rank);

}  // namespace shardplan::executor
