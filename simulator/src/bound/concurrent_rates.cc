// SPDX-License-Identifier: Apache-2.0
#include "bound/concurrent_rates.h"

#include <algorithm>

#include "shardplan/simulator/lower_bound.h"

namespace shardplan {
namespace internal {

// Links do not slow each other, so the set with all of them does as much as any with fewer.
std::vector<ConcurrentRates> ConcurrentRatesOf(const Cluster& cluster) {
  constexpr std::int64_t kAlone = 1'000'000;
  const std::size_t links = cluster.links.size();
  return {{kAlone, std::vector<std::int64_t>(links, 0)},
          {0, std::vector<std::int64_t>(links, kAlone)},
          {cluster.compute_rate_while_communicating_ppm,
           std::vector<std::int64_t>(links, cluster.communication_rate_while_computing_ppm)}};
}

// With w the price of a wait, b those of the links, a' that of other kernels:
//   w + sum(b) <= 1,   rate of kernels x a' + rate of collectives x (w + sum(b)) <= 1,   a' <= a
PricesBesideWaits HighestBesideWaits(const Cluster& cluster, const WindowPrices& prices) {
  __extension__ using Int128 = __int128;
  PricesBesideWaits beside{.copies = prices.kernels, .waits = kPriceScale};
  for (const std::int64_t link : prices.links) beside.waits -= std::min(link, beside.waits);
  const std::int64_t kernels_ppm = cluster.compute_rate_while_communicating_ppm;
  if (kernels_ppm == 0) return beside;
  const Int128 left = Int128{kPriceScale} * (1'000'000 - cluster.communication_rate_while_computing_ppm);
  beside.copies = static_cast<std::int64_t>(std::min<Int128>(beside.copies, left / kernels_ppm));
  return beside;
}

}  // namespace internal

WindowPrices HighestPrices(const Cluster& cluster, std::int64_t kernels,
                           const std::vector<std::int64_t>& shares) {
  __extension__ using Int128 = __int128;
  WindowPrices prices{kernels, std::vector<std::int64_t>(shares.size(), 0)};
  Int128 most = kPriceScale;
  for (const internal::ConcurrentRates& rates : internal::ConcurrentRatesOf(cluster)) {
    Int128 left = Int128{kPriceScale} * 1'000'000 - Int128{kernels} * rates.kernels_ppm;
    Int128 taken = 0;  // by one price of kPriceScale, cut by the shares
    for (std::size_t l = 0; l < shares.size(); ++l) taken += Int128{shares[l]} * rates.links_ppm[l];
    if (taken > 0) most = std::min(most, std::max<Int128>(left, 0) * kPriceScale / taken);
  }
  for (std::size_t l = 0; l < shares.size(); ++l) {
    prices.links[l] = static_cast<std::int64_t>(most * shares[l] / kPriceScale);
  }
  return prices;
}

}  // namespace shardplan
