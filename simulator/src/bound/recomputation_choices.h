// SPDX-License-Identifier: Apache-2.0
// Recomputation in a stretch of operators: every consistent choice that some price of time and memory makes
// the cheapest.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

namespace shardplan::internal {

// A tensor that the stretch makes.
struct MadeTensor {
  std::int64_t bytes = 0;
  bool used_later = false;            // by a later pass
  std::int32_t maker = -1;            // operator that runs again where it is not kept
  std::vector<std::int32_t> readers;  // operators that need it when they run again
  auto operator<=>(const MadeTensor&) const = default;
};

struct RecomputationGraph {
  std::vector<std::int64_t> operators_ns;
  std::vector<MadeTensor> tensors;
  auto operator<=>(const RecomputationGraph&) const = default;
};

struct RecomputationChoice {
  std::int64_t again_ns = 0;
  std::int64_t kept_bytes = 0;
};

// [Note: a consistent choice]
// A tensor is needed if a later pass uses it or an operator that runs again reads it. A needed tensor is
// kept, or its maker runs again. At given prices of a nanosecond and of a byte the cheapest choice is a
// minimum cut: operators that run again are on the side of the source.
//
//   source --(bytes)--> maker --(duration)--> sink          a tensor that a later pass uses
//   reader --(bytes)--> maker --(duration)--> sink          one that is needed if its reader runs again
//
// The answer is the lower convex hull of all choices: fewest nanoseconds first. Between two neighbours of it
// there is no other: a minimum cut at the prices at which both cost the same says so.
std::vector<RecomputationChoice> CheapestChoices(const RecomputationGraph& graph);

}  // namespace shardplan::internal
