// SPDX-License-Identifier: Apache-2.0
// Every allocation of a plan and its free, one by one, in host order: what the caching allocator is asked for
// (docs/reference/memory.md).
//
//   actions  0    1    2    3    4    5    6    7
//            +a   +b   -a   +c   +d   -c   -b   +e      + allocates a block, - frees it
//   a        |=========|                                born 0, died 2
//   b             |========================|            born 1, died 6
//   c                       |=========|                 born 3, died 5
//   d                            |================...   born 4, died -1: alive at the end
//                 ^ first_recorded: what comes before was there before the steps
//
// [Note: who makes and drops what]
// The history has the plan's own allocations and frees, those of the model inside the segments, and the
// optimizer's. It never guesses a free: they are instructions of the plan. Three things are implied by an
// instruction: a segment makes the unsharded gradients that it lists (a plan's `free` drops them), the first
// optimizer step makes the optimizer's states, and a zero_grad drops the sharded gradients that are left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// The names of all categories: buffer roles, then storage roles, then "kernel_temp" (memory that a kernel
// takes and gives back) and "cublas_workspace". An unsharded gradient is "grad_unsharded" whoever allocates
// it.
const std::vector<std::string>& MemoryCategories();

// A point in the program: the instruction during which something was allocated or freed.
struct MemoryPoint {
  std::int32_t step = -1;     // -1: before the first step
  std::int32_t trigger = -1;  // -1: before the first, or of the step's inputs; their number: behind the last
  std::int32_t instruction = -1;  // in the trigger
  std::int32_t entry = -1;        // of a compute: index in its segment
  bool operator==(const MemoryPoint&) const = default;
};

// One allocation.
struct MemoryBlock {
  Bytes requested_bytes;
  std::int32_t category = -1;  // index into MemoryCategories()
  StreamId stream = 0;         // whose pool it comes from
  UnitId unit = -1;            // whose buffer it is, or in whose segment it is allocated; -1: of none
  BufferId buffer = -1;        // of the plan; -1: the model's or the optimizer's own
  std::int32_t part = 0;       // of the buffer
  std::int32_t microbatch = 0;
  std::vector<StreamId> recorded_on;  // record_stream: streams, besides its own, that its free waits for
  std::int32_t born = -1;             // index of its action
  std::int32_t died = -1;             // -1: alive at the end
  bool operator==(const MemoryBlock&) const = default;
};

struct MemoryAction {
  std::int32_t block = -1;
  bool frees = false;
  MemoryPoint at;
  bool operator==(const MemoryAction&) const = default;
};

struct MemoryHistory {
  std::vector<MemoryBlock> blocks;
  std::vector<MemoryAction> actions;
  // Actions before it belong to what was there before the steps, and of a plan of one step to its first run:
  // such a plan is steady only when the optimizer's states are there.
  std::size_t first_recorded = 0;
};

// The memory space. kHost: buffers in host memory, and the optimizer's tensors of shards there. A pinned
// allocation takes the next power of two (c10's CachingHostAllocator).
enum class MemorySpace : std::uint8_t { kDevice, kHost };

struct MemoryHistoryOptions {
  MemorySpace space = MemorySpace::kDevice;
  // Include temporaries that kernels allocate inside themselves, by formulas (kernel_memory.h).
  bool kernel_temporaries = false;
  // 0: every step of the plan once (a plan of one step: twice). Else every step once, and then the steps that
  // repeat, until these were passed so often; what comes before the last pass is not recorded
  // (first_recorded).
  std::int32_t steady_passes = 0;
  // With passes: no more steps than these, 0: all. The last one is recorded if they end before the steps that
  // repeat.
  std::int32_t steps = 0;
};

// Deterministic. Streams of blocks are the plan's; the model's memory comes from streams[0].
MemoryHistory MemoryHistoryOf(const Plan& plan, const MemoryHistoryOptions& options = {});

// The name of a block: a buffer's name ("layers.0.all_gather_output"), or the operator that it was allocated
// for
// ("aten.mm"), an input's or a module buffer's name, "exp_avg..." of the optimizer; "" when nothing is known.
std::string BlockName(const Plan& plan, const MemoryHistory& history, std::int32_t block);

// "pre_forward layers.3" and the instruction, as people read a point; "before the steps" for the persistent.
std::string PointText(const Plan& plan, const MemoryPoint& at);

// The FQN of a unit, "(root)" for the root and "" for none.
std::string UnitText(const Plan& plan, UnitId unit);

}  // namespace shardplan
