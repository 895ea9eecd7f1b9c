// SPDX-License-Identifier: Apache-2.0
// The flag --mesh.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

// "replicate=2" "shard=8". kUsage: another form.
Result<std::vector<StrategyMeshDim>> ParseMesh(const std::vector<std::string>& mesh);

}  // namespace shardplan::cli
