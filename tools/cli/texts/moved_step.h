// SPDX-License-Identifier: Apache-2.0
// The step with other figures of a cluster.
#pragma once

#include <string>

#include "shardplan/schemas/cluster.h"

namespace shardplan::cli {

// The step of a shipped trace (tools/clusters/reference) under fsdp2 on the ranks of a node, and on those of
// the whole cluster: before and after. A line that says why where one of the two cannot be planned or
// simulated.
std::string MovedStepText(const Cluster& before, const Cluster& after);

}  // namespace shardplan::cli
