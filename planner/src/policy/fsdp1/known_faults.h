// SPDX-License-Identifier: Apache-2.0
// What FSDP1 itself does wrong, or does wrong with this program.
#pragma once

#include <vector>

#include "policy/fsdp1/context.h"
#include "shardplan/planner/policy.h"

namespace shardplan::fsdp1 {

std::vector<PyTorchFault> KnownFaults(const Context& context);

}  // namespace shardplan::fsdp1
