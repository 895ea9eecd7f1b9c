// SPDX-License-Identifier: Apache-2.0
// Pass `record_order`: the points that the host passes in a step, in order, with the model's own work between
// them. It says where hooks of units fire, not what they do: that is the policy's.
#pragma once

#include <vector>

#include "shardplan/planner/hook_points.h"
#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan {

// The steps of the strategy's program, equal ones at its end left out: the last repeats for ever. The calls
// that HookPoint points to are the strategy's. kBadInput: a program that names a pass that does not exist,
// ...
Result<std::vector<RecordedStep>> RecordOrder(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, const Strategy& strategy,
                                              bool inputs_wrapped);

}  // namespace shardplan
