// SPDX-License-Identifier: Apache-2.0
// Collectives from the latencies and rates of links alone.
#pragma once

#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

// The fastest of what the links of the group can do: protocols and algorithms. kBadInput: a link is missing.
Result<CollectiveCost> ModelledCollective(const Cluster& cluster, const CollectiveRequest& request,
                                          const GroupPlacement& place);

// The loads of the collective's movement on the cluster's links. Links that the cluster lacks are not used.
LinkLoads ModelledLoads(const Cluster& cluster, const CollectiveRequest& request,
                        const GroupPlacement& place);

// The size of the collective, if every rank moved as much as the busiest one.
Bytes BusiestBytes(const CollectiveRequest& request);

}  // namespace shardplan::internal
