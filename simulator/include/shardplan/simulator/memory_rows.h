// SPDX-License-Identifier: Apache-2.0
// Memory at the points that people name: before and after every hook of every unit, and at the peak
// (docs/internals/simulator.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {

// Allocated bytes at one point of a step, between two instructions.
struct MemoryRow {
  // step_begin, pre_forward.before, pre_forward.after, post_forward.before, post_forward.after, forward_end,
  // loss_end, pre_backward.before, pre_backward.after, recompute.before, recompute.after,
  // post_backward.before, post_backward.after, backward_end.before, backward_end.after, backward_returned,
  // optimizer_step_end, zero_grad_end, step_end
  std::string event;
  UnitId unit = -1;
  std::int32_t microbatch = 0;
  Bytes total_bytes;
  std::vector<Bytes> by_category;  // like MemoryCategories()
  std::int32_t action = -1;        // the last one before the row, as in MemorySample
  bool operator==(const MemoryRow&) const = default;
};

// The point at which a step reached its largest total, and the allocation that reached it.
struct MemoryPeak {
  Bytes total_bytes;
  std::vector<Bytes> by_category;
  std::string phase;       // forward, loss, backward, recompute, optimizer
  UnitId unit = -1;        // whose hook was passed last, in its instructions the one they are for
  std::string allocation;  // a buffer's name, or the operator that the allocation was for ("aten.mm")
  ModuleId module = -1;    // of the operator
  MemoryPoint at;
  bool operator==(const MemoryPeak&) const = default;
};

struct MemoryRows {
  std::vector<MemoryRow> rows;
  MemoryPeak peak;
};

// Rows and peak of plan.steps[step]. `profile` holds samples of the same plan.
MemoryRows RowsOf(const Plan& plan, const MemoryProfile& profile, std::int32_t step);

}  // namespace shardplan
