// SPDX-License-Identifier: Apache-2.0
// Memory that a plan never gives back.
#pragma once

#include <set>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// Buffers that are alive behind the steps that repeat and were not before them, or that no step that repeats
// has anything to do with. Allocations and frees are counted as they are written; of the gradients that the
// model makes, those of units that have one buffer for a parameter.
std::set<BufferId> LeftOver(const Plan& plan);

}  // namespace shardplan::test
