// SPDX-License-Identifier: Apache-2.0
// The groups of a communicator.
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// The first rank of a rank's group: the one whose digits in the communicator are zero. Below kMaxRanks:
// divisions are of 32 bits.
std::int64_t LeaderOf(const Communicator& communicator, std::int64_t rank);

// A rank's place in its group, and the rank at a place of the group that `leader` leads.
std::int64_t PlaceInGroup(const Communicator& communicator, std::int64_t rank);
std::int64_t RankAtPlace(const Communicator& communicator, std::int64_t leader, std::int64_t place);

}  // namespace shardplan::internal
