// SPDX-License-Identifier: Apache-2.0
// Collectives from the latencies and rates of links alone.
#pragma once

#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

// The fastest of what the links of the group can do: protocols and algorithms. kBadInput: a link is missing.
Result<CollectiveCost> ModelledCollective(const Cluster& cluster, const CollectiveRequest& request,
                                          const GroupPlacement& place);

// An all-to-all in which each rank sends `sent_bytes` in equal parts to all ranks of its group, or a send of
// so many to the next rank. No plan has them: they are compared with measurements (docs/reference/cost.md).
// One latency, and the bytes at the rates of the links, both at once. kBadInput: a link is missing.
Result<CollectiveCost> ModelledExchange(const Cluster& cluster, bool to_all, std::int64_t ranks,
                                        const GroupPlacement& place, Bytes sent_bytes);

// Loads of a group's rings on the cluster's links. Links that the cluster lacks are not used.
LinkLoads LoadsOfRing(const Cluster& cluster, const GroupPlacement& place);

}  // namespace shardplan::internal
