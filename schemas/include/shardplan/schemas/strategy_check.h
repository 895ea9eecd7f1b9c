// SPDX-License-Identifier: Apache-2.0
// Consistency of a strategy's fields: rules that the JSON Schema cannot express and planning relies on.
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// kBadInput, with the pointer: no policy has this name, the mesh is none, an argument that the optimizer does
// not take, a call that the policy does not know, a backward of a micro-batch that has had no forward, ...
// Whatever a strategy alone says cannot be planned; what depends on the trace or the cluster, planning says.
// Reading a strategy asks it, and planning.
Status CheckStrategy(const Strategy& strategy);

}  // namespace shardplan
