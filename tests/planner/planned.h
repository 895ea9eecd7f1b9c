// SPDX-License-Identifier: Apache-2.0
// Plans of small traces, for tests that look into them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "tests/planner/synthetic.h"

namespace shardplan::testing {

// The plan, or an empty one and a failure of the test.
inline Plan Planned(const Trace& trace, const Strategy& strategy, std::int64_t ranks = 2) {
  Result<PlannerOutput> planned = MakePlan(trace, strategy, ClusterOf(ranks));
  if (!planned) ADD_FAILURE() << ToString(planned.error());
  return planned ? std::move(planned->plan) : Plan{};
}

inline std::vector<std::string> UnitNames(const Plan& plan) {
  std::vector<std::string> names;
  for (const Unit& unit : plan.units) names.push_back(unit.fqn);
  return names;
}

}  // namespace shardplan::testing
