// SPDX-License-Identifier: Apache-2.0
// Collectives from the latencies and rates of links alone.
#pragma once

#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

// The fastest of what the links of the group can do: protocols and algorithms. kBadInput: a link is missing.
Result<CollectiveCost> ModelledCollective(const Cluster& cluster, const CollectiveRequest& request,
                                          const GroupPlacement& place);

// What the rings of a group take of the cluster's links. Links that the cluster lacks are not used.
LinkLoads LoadsOfRing(const Cluster& cluster, const GroupPlacement& place);

}  // namespace shardplan::internal
