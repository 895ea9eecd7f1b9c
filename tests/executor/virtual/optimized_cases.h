// SPDX-License-Identifier: Apache-2.0
// Plans that the optimising planner makes of small models.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {

struct OptimizedCase {
  std::uint32_t seed = 0;
  std::string policy;
  std::int32_t microbatches = 1;
  bool replicas = false;
  int percent = 100;  // of what the fastest plan reserves
};

std::string NameOf(const OptimizedCase& what);
void PrintTo(const OptimizedCase& what, std::ostream* out);
std::vector<OptimizedCase> OptimizedCases();
inline constexpr std::int64_t kOptimizedRanks = 4;

// The job with the strategy that the search finds, named "optimized/...".
Result<PlanCase> Optimized(const OptimizedCase& what);

}  // namespace shardplan::test
