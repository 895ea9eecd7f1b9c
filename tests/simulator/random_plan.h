// SPDX-License-Identifier: Apache-2.0
// Random small plans that can run: waits only on what was recorded before, collectives of a communicator on
// one stream.
#pragma once

#include <cstdint>
#include <random>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// The same plan for the same seed on every machine (only std::mt19937_64 and remainders are used).
Plan RandomPlan(std::uint64_t seed);

}  // namespace shardplan::test
