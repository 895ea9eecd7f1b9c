// SPDX-License-Identifier: Apache-2.0
// The parts that collectives of the model cut a segment into.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// A run of operators with nothing between them, or a collective of the model, or a wait for one.
struct SegmentPart {
  std::int32_t entry = -1;     // the first of its entries
  std::int32_t operators = 0;  // of a run; 0: it is none
  Bytes size_bytes;     // a collective: its tensor, or what all of its group move in the busier direction
  bool joined = false;  // ... in the kernel that the first of its group is
};

// In order; none where the segment has no collectives and no waits.
std::vector<SegmentPart> PartsOf(const Segment& segment);

}  // namespace shardplan::internal
