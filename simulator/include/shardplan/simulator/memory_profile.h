// SPDX-License-Identifier: Apache-2.0
// Memory of a plan over its steps: allocated bytes by category, in host order (docs/reference/memory.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan {

// Allocated bytes after one allocation or free, by category (index into MemoryCategories()), host order.
struct MemorySample {
  Nanoseconds time_ns;
  std::int32_t category = -1;
  Bytes category_bytes;  // of that category after it
  Bytes total_bytes;     // of all after it
  std::int32_t step = 0;
  std::int32_t trigger = -1;      // -1: before the first, or of the step's inputs
  std::int32_t instruction = -1;  // in the trigger
  std::int32_t entry = -1;        // of a compute: index in its segment
  std::int32_t action = -1;       // index into MemoryHistory::actions; -1: of what was there before them
  bool operator==(const MemorySample&) const = default;
};

struct TimeRange {
  Nanoseconds start_ns;
  Nanoseconds end_ns;
};

struct MemoryOptions {
  Bytes granularity_bytes{512};  // every allocation is rounded up to a multiple
  bool record_samples = false;
  // Samples of this step and the later ones: what is alive when it begins, a sample each, then every change.
  std::int32_t first_sampled_step = 0;
  // Used where no history is given: the memory space, and whether kernels' temporaries are included
  // (categories "kernel_temp" and "cublas_workspace").
  MemorySpace space = MemorySpace::kDevice;
  bool kernel_temporaries = false;
  // Times of the samples, by step, trigger and instruction. Samples inside a segment are spread evenly over
  // its operators. Empty: zero.
  std::vector<std::vector<std::vector<TimeRange>>> times;
};

struct MemoryProfile {
  Bytes peak_bytes;  // over all steps, each once (a plan of one step: its second run); ties: the later step
  MemoryPoint peak_at;
  std::vector<Bytes> peak_by_category;  // like MemoryCategories(), sums to peak_bytes
  Bytes end_bytes;                      // alive after the last step
  std::vector<Bytes> step_peak_bytes;   // by step
  std::vector<MemorySample> samples;
  bool operator==(const MemoryProfile&) const = default;
};

// Keeps no history.
MemoryProfile ProfileMemory(const Plan& plan, const MemoryOptions& options = {});
// The same of a history that is already there.
MemoryProfile ProfileMemory(const Plan& plan, const MemoryHistory& history,
                            const MemoryOptions& options = {});

// Device memory that NCCL takes for a communicator of the plan, an estimate: 16 channels, each with the
// receive buffers of the three protocols (4 MiB simple, 4.6875 MiB LL128, 0.5 MiB LL), when it has more than
// one rank (defaults of NCCL 2.x, src/init.cc: buffers are made when a communicator connects its ring).
Bytes NcclBufferBytes(const Communicator& communicator);
// The sum over all communicators.
Bytes NcclBufferBytes(const Plan& plan);

// Memory at the points that people name: before and after every hook of every unit, and at the peak
// (docs/internals/simulator.md).

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

// Device memory pool by pool: every stream's memory comes back to that stream alone, so what a plan needs is
// the sum of the pools' own peaks, at whatever times these are (docs/reference/optimize.md).

struct PooledMemory {
  Bytes pooled_bytes;     // sum of the peaks of the pools, over all steps
  Bytes allocated_bytes;  // peak of all pools together
  bool operator==(const PooledMemory&) const = default;
};

// Blocks are rounded up to 512 bytes, as the caching allocator does; frees count where the host issues them.
PooledMemory PoolMemory(const Plan& plan);

// Memory of gradients that wait for their reduction: micro-batches without synchronisation (no_sync,
// set_requires_gradient_sync(False)), or reduced over a part of the ranks so far
// (set_requires_all_reduce(False), inner_reduce_ranks).

struct DeferredGradients {
  Bytes peak_bytes;        // each allocation rounded up to 512; 0: none waits
  std::int32_t units = 0;  // whose gradients wait at that point
  MemoryPoint at;          // the first point with that much
  bool operator==(const DeferredGradients&) const = default;
};

// Over plan.steps[step]. A gradient waits if it is alive, not reduced over all its ranks, where a backward
// ends:
//
//   micro-batch       0                 1                 2
//   backward      |--------|        |--------|        |--------|
//   gradient          +=====================================-      waits from + on
//   another                +-                                       does not
//
// It counts from its allocation to its free.
DeferredGradients DeferredGradientsOf(const Plan& plan, std::int32_t step);
DeferredGradients DeferredGradientsOf(const Plan& plan, const MemoryHistory& history, std::int32_t step);

}  // namespace shardplan
