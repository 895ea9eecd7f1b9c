// Which unit's compute a segment is.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// By segment: the unit in whose forward, backward or recomputation it is ("forward layers.0"; of a recomputed
// module the innermost unit around it); -1: of none (the loss).
std::vector<UnitId> SegmentUnits(const Plan& plan);

}  // namespace shardplan::internal
