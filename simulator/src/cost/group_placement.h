// SPDX-License-Identifier: Apache-2.0
// The groups of a communicator.
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// The first rank of a rank's group: the one whose digits in the communicator are zero. Below kMaxRanks:
// divisions are of 32 bits.
std::int64_t LeaderOf(const Communicator& communicator, std::int64_t rank);

}  // namespace shardplan::internal
