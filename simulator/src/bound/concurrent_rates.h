// SPDX-License-Identifier: Apache-2.0
// How fast kernels and collectives go while they run at the same time, as inequalities: the one place where
// the bound learns what engine.h's note on rates says.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan::internal {

// Upper bound: progress in a nanosecond in which everything of the set is active, in parts per million of a
// nanosecond of work alone. It is for kernels, and for the collectives of each link.
struct ConcurrentRates {
  std::int64_t kernels_ppm = 0;
  std::vector<std::int64_t> links_ppm;
};

// Every set of classes that can be active at a time, or one that does as much of everything.
std::vector<ConcurrentRates> ConcurrentRatesOf(const Cluster& cluster);

// The highest prices, beside allowed ones of the links, while the compute stream waits for a collective of
// the model: it and the links are active, or these and kernels of other streams. A price of a wait takes what
// the links leave.
PricesBesideWaits HighestBesideWaits(const Cluster& cluster, const WindowPrices& prices);

}  // namespace shardplan::internal
