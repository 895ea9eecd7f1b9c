// Straight lines below what collectives and copies cost: no way to cut a sum of bytes into pieces costs less
// than the line says of the sum.
#pragma once

#include <cstdint>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

__extension__ using Int128 = __int128;

// Of nanoseconds, in the slopes of lines.
inline constexpr std::int64_t kSlopeScale = std::int64_t{1} << 32;

// A collective of b bytes, 1 <= b <= most_bytes, takes at least fixed_ns + b * per_byte / kSlopeScale.
struct CostLine {
  std::int32_t link = -1;  // -1: it costs nothing
  std::int64_t fixed_ns = 0;
  std::int64_t per_byte = 0;
};

// [Note: what a line relies on]
// The cost is asked at sizes that grow by a sixty-fourth, and at those of the cluster's tables. Between two
// of these it is taken for concave, or for a power law (cost_model.h, InterpolateDuration): such a one sags
// below its chord by less than a 4096th where its exponent is at most 3; where it rises more steeply, the
// lower end counts for the whole stretch.
CostLine LineBelow(const CostModel& costs, const Cluster& cluster, CollectiveKind kind,
                   const Communicator& communicator, std::int64_t world_size, std::int64_t most_bytes);

// A kernel that moves that many bytes takes at least bytes * slope / kSlopeScale.
std::int64_t CopySlope(const CostModel& costs);

}  // namespace shardplan::internal
