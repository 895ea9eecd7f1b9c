// SPDX-License-Identifier: Apache-2.0
// The rounds of a plan of resharding as one rank sees them.
#pragma once

#include <cstdint>
#include <functional>

#include "shardplan/schemas/reshard.h"

namespace shardplan {

// ForEachReshardRound with only those pieces that `rank` sends, receives or keeps; the rounds are the same
// ones, and some may have none. So the memory is that of a rank's own pieces.
void ForEachReshardRoundOf(const ReshardPlan& plan, std::int64_t rank,
                           const std::function<void(ReshardRound)>& visit);

}  // namespace shardplan
