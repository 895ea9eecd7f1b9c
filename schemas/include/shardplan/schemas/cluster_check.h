// SPDX-License-Identifier: Apache-2.0
// Consistency of a cluster's fields: rules that the JSON Schema cannot express and the cost model relies on.
#pragma once

#include <string>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// kBadInput: points of efficiency curves and of tables of collectives do not ascend. `pointer` is where the
// document has the cluster ("" or "/cluster").
Status CheckCluster(const Cluster& cluster, const std::string& pointer = {});

}  // namespace shardplan
