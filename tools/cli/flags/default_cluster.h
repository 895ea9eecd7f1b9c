// SPDX-License-Identifier: Apache-2.0
// The cluster that plans are for when nobody names one.
#pragma once

#include <string>

#include "flags/cluster_choice.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

// A node's, or several nodes' devices where more ranks than a node's are wanted.
inline constexpr const char* kDefaultNode = "h100_sxm_8";
inline constexpr const char* kDefaultNodes = "h100_sxm_64";

// ChooseCluster with these. An error of the strategy names its file.
Result<ChosenCluster> ChooseClusterOrDefault(const ClusterFlags& flags, const Strategy& strategy,
                                             const std::string& strategy_path,
                                             const ReadClusterFunction& read = ReadCluster);

}  // namespace shardplan::cli
