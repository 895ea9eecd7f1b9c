// SPDX-License-Identifier: Apache-2.0
// The kinds of collectives: a row each, of what moves between the ranks and what it is called elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/cluster.h"

namespace shardplan {

// How bytes go between the ranks of a group; what a cost is computed by.
enum class CollectiveMovement : std::uint8_t {
  kRing,       // every rank's part goes round
  kRingTwice,  // ... twice: reduced, then gathered
  kChain,      // the whole tensor goes from one rank through all
  kExchange,   // every rank sends each other one its part
  kRooted,     // one rank sends each other one its part, or gets it
  kTransfer,   // one rank sends the whole to another
};

struct CollectiveDescription {
  CollectiveKind kind;
  CollectiveMovement movement;
  bool of_plans;                // FSDP's own: a kind of instruction
  std::string_view measured;    // the name in tables of measurements
  std::string_view nccl_tests;  // the program of nccl-tests without _perf
  std::string_view size;        // what size_bytes and full_tensor_bytes are of, in words
};

// NCCL has no gather and scatter: c10d's are sends and receives, as nccl-tests' own.
inline constexpr auto kCollectiveKinds = std::to_array<CollectiveDescription>({
    {CollectiveKind::kAllGather, CollectiveMovement::kRing, true, "all-gather", "all_gather", "its output"},
    {CollectiveKind::kReduceScatter, CollectiveMovement::kRing, true, "reduce-scatter", "reduce_scatter",
     "its input"},
    {CollectiveKind::kAllReduce, CollectiveMovement::kRingTwice, true, "all-reduce", "all_reduce",
     "its tensor"},
    {CollectiveKind::kAllToAll, CollectiveMovement::kExchange, false, "all-to-all", "alltoall",
     "what a rank sends, its own part included"},
    {CollectiveKind::kBroadcast, CollectiveMovement::kChain, false, "broadcast", "broadcast", "its tensor"},
    {CollectiveKind::kReduce, CollectiveMovement::kChain, false, "reduce", "reduce", "its tensor"},
    {CollectiveKind::kGather, CollectiveMovement::kRooted, false, "gather", "gather",
     "the output of the root"},
    {CollectiveKind::kScatter, CollectiveMovement::kRooted, false, "scatter", "scatter",
     "the input of the root"},
    {CollectiveKind::kSend, CollectiveMovement::kTransfer, false, "send-recv", "sendrecv", "the message"},
    {CollectiveKind::kReceive, CollectiveMovement::kTransfer, false, "", "", "the message"},
});
inline constexpr std::size_t kCollectiveKindCount = kCollectiveKinds.size();
static_assert(
    [] {
      for (std::size_t k = 0; k < kCollectiveKindCount; ++k) {
        if (kCollectiveKinds[k].kind != static_cast<CollectiveKind>(k)) return false;
      }
      return !IsEnumerator<static_cast<CollectiveKind>(kCollectiveKindCount)>();
    }(),
    "a row for every kind of collective, in order");

constexpr const CollectiveDescription& DescriptionOf(CollectiveKind kind) {
  return kCollectiveKinds[static_cast<std::size_t>(kind)];
}

}  // namespace shardplan
