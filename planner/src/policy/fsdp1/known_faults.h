// SPDX-License-Identifier: Apache-2.0
// Faults of FSDP1 itself, or of FSDP1 with this program.
#pragma once

#include <vector>

#include "policy/fsdp1/context.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp1 {

std::vector<PyTorchFault> KnownFaults(const Context& context);

}  // namespace shardplan::fsdp1
