// SPDX-License-Identifier: Apache-2.0
// Random module trees, units and knobs.
#pragma once

#include <cstdint>
#include <random>

#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "tests/planner/synthetic.h"

namespace shardplan::testing {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  int Below(int bound) { return static_cast<int>(engine_() % static_cast<std::uint32_t>(bound)); }
  bool Chance(int percent) { return Below(100) < percent; }

 private:
  std::mt19937 engine_;
};

struct RandomPlanCase {
  Trace trace;
  Strategy strategy;
  std::int64_t ranks = 4;
};

// A layered model of up to three levels and a strategy of random knobs; `may_freeze`: some modules are
// frozen.
RandomPlanCase RandomCase(std::uint32_t seed, bool may_freeze);

}  // namespace shardplan::testing
