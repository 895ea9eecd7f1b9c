// SPDX-License-Identifier: Apache-2.0
// Layouts that a command line names.
#pragma once

#include <string>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/error.h"

namespace shardplan::cli {

// A layout, or the layout of a plan's state.
Result<StateLayout> ReadLayout(const std::string& path);

}  // namespace shardplan::cli
