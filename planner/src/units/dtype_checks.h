// SPDX-License-Identifier: Apache-2.0
// Dtypes that PyTorch refuses while a step runs, which units say beforehand.
#pragma once

#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/partition.h"

namespace shardplan {

// kBadInput, with torch's own words: a dtype that the step of some unit fails with.
// docs/reference/strategy-format.md has the table.
Status CheckDTypes(const Trace& trace, const Strategy& strategy, const Partition& partition);

}  // namespace shardplan
