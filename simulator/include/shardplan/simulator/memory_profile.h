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

}  // namespace shardplan
