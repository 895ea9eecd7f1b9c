// SPDX-License-Identifier: Apache-2.0
// Costs of a segment of the model, for filler compute.
#pragma once

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::run {

// Sum over the segment's operators: the measured duration, else the larger of flops at the cluster's rate for
// the dtype (its efficiency curve between points linear in log flops) and bytes at the memory's rate.
Nanoseconds SegmentCost(const Segment& segment, const Cluster& cluster);

}  // namespace shardplan::run
