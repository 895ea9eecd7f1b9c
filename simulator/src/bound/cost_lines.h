// SPDX-License-Identifier: Apache-2.0
// Straight lines below what collectives and copies cost: no way to cut a sum of bytes into pieces costs less
// than the line says of the sum.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

__extension__ using Int128 = __int128;

// The scale of nanoseconds in the slopes of lines.
inline constexpr std::int64_t kSlopeScale = std::int64_t{1} << 32;

// All that is moved by collectives of a kind: without padding, and the most that it can be.
struct CollectiveSizes {
  std::int64_t usual_bytes = 0, most_bytes = 0;
};

// A collective of b bytes, 1 <= b <= most_bytes, has each link do at least
// fixed_ns + b * per_byte / kSlopeScale of work.
struct CostLine {
  std::int64_t fixed_ns = 0;
  std::int64_t per_byte = 0;
};
using CostLines = std::array<CostLine, std::tuple_size_v<decltype(LinkLoads::ppm)>>;

// [Note: what a line relies on]
// The cost is asked at sizes that grow by a 512th, and at those of the cluster's tables. Between two of these
// it is taken to lie between the costs at both, as all models of cost_model.h do; the lower of them counts
// for the whole stretch.
//
// A collective may use several links at once (LinkLoads): its work on a link is its time alone times its load
// there, and is spread over that time like that on the others.
CostLines LinesBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                     const Communicator& communicator, std::int64_t world_size, const CollectiveSizes& of);

// A collective of b bytes, least_bytes <= b <= most_bytes, takes at least b * slope / kSlopeScale. 0: nothing
// is known.
std::int64_t SlopeBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                        const Communicator& communicator, std::int64_t world_size, std::int64_t least_bytes,
                        std::int64_t most_bytes);

// A collective of the model. kBadInput: its ranks are too many.
Result<CollectiveCost> CostOfTraced(const CostModel& costs, const Cluster& cluster, const Communicator& group,
                                    std::int64_t world_size, const ModelCollective& collective, Bytes size);

// A kernel that moves that many bytes takes at least bytes * slope / kSlopeScale.
std::int64_t CopySlope(const CostModel& costs);

}  // namespace shardplan::internal
