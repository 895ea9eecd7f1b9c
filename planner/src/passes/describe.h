// SPDX-License-Identifier: Apache-2.0
// Pass `describe`: what a plan says of itself beside its program.
#pragma once

#include "policy/policy_passes.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// `plan` with the model, the mesh, the cluster, the strategy, inputs, buffers and tokens.
Result<Plan> DescribePlan(Plan plan, const PolicyInput& input, const PolicyPasses& policy,
                          const Cluster& cluster);

}  // namespace shardplan
