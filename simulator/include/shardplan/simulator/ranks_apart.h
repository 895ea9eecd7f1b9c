// SPDX-License-Identifier: Apache-2.0
// A step with every rank simulated by itself: slow ranks, chance, and what the others wait for them
// (docs/internals/simulator.md, "Ranks apart").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/simulator/engine.h"

namespace shardplan {

struct Straggler {
  std::int32_t rank = 0;
  std::int64_t kernels_ppm = 1'000'000;  // of the time that its kernels take; not below a million
};

struct RanksApartOptions {
  std::vector<Straggler> stragglers;
  std::int64_t jitter_ppm = 0;  // each kernel takes up to so much longer, evenly distributed
  std::uint64_t seed = 1;
};

struct RankTimes {
  Nanoseconds end_ns;     // host and device are done
  Nanoseconds waited_ns;  // between coming to collectives and their begin
};

struct RanksApart {
  Nanoseconds step_ns;  // of the last rank
  std::vector<RankTimes> ranks;
};

// Runs the last step of a lowered plan. Without stragglers and jitter every rank is as RunStep. kBadInput: a
// straggler that is no rank of the plan, or too many ranks; kNegative: a wait can never finish.
Result<RanksApart> RunRanksApart(const Plan& plan, const EngineProgram& program,
                                 const RanksApartOptions& options);

// Lines for a person: the step next to that of one rank that stands for all, and who waits.
std::string RanksApartText(const RanksApart& apart, Nanoseconds alike_ns);

}  // namespace shardplan
