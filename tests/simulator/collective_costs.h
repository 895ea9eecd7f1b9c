// SPDX-License-Identifier: Apache-2.0
// Costs of collectives on small clusters.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "shardplan/simulator/cost_model.h"

namespace shardplan::test {

inline std::vector<CollectivePoint> Points(
    std::initializer_list<std::pair<std::int64_t, std::int64_t>> points) {
  std::vector<CollectivePoint> made;
  for (const auto& [bytes, time] : points) made.push_back({Bytes{bytes}, Nanoseconds{time}});
  return made;
}

// A byte a nanosecond inside a node, a tenth of it through each adapter; steps of 10 ns and of 1 us.
inline Cluster TwoLinks(std::int64_t ranks, std::int64_t ranks_per_node) {
  Cluster cluster;
  cluster.ranks = ranks;
  cluster.ranks_per_node = ranks_per_node;
  cluster.links = {{"nvlink", Nanoseconds{10}, 1'000'000'000}, {"network", Nanoseconds{1'000}, 100'000'000}};
  return cluster;
}

// The cost of a collective over a communicator on the cluster's ranks.
inline Result<CollectiveCost> CostOf(const CostModel& model, const Cluster& cluster, CollectiveKind kind,
                                     const Communicator& communicator, std::int64_t bytes,
                                     std::int64_t busiest_ppm = 1'000'000) {
  const std::vector<GroupPlacement> placements = PlaceGroups(cluster, communicator, cluster.ranks);
  return model.Collective({kind, communicator.size, placements, Bytes{bytes}, busiest_ppm});
}

}  // namespace shardplan::test
