// SPDX-License-Identifier: Apache-2.0
// Collectives by measured tables, and by what is fitted to them for other numbers of ranks.
#pragma once

#include <map>
#include <optional>
#include <tuple>

#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

class CollectiveTables {
 public:
  explicit CollectiveTables(const Cluster& cluster) : cluster_(cluster) {}

  // Nothing where no table of the cluster says anything about such a group.
  std::optional<CollectiveCost> Cost(const CollectiveRequest& request, const GroupPlacement& place);

 private:
  using Key = std::tuple<CollectiveKind, std::int64_t, std::int64_t, std::int64_t>;

  const Cluster& cluster_;
  std::map<Key, CollectiveTable> fitted_;  // by kind, ranks, nodes, concurrent groups
};

}  // namespace shardplan::internal
