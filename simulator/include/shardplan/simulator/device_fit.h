// SPDX-License-Identifier: Apache-2.0
// Does a plan fit? The one answer, for `memory`, `simulate`, `evaluate`, `sweep` and `optimize`
// (docs/reference/memory.md, "Does it fit?").
//
//   device memory  = outside                                 + budget
//                    CUDA context, NCCL's buffers              what the caching allocator may reserve:
//                    of the plan's communicators               parameters, gradients, states, activations,
//                                                              cuBLAS workspaces, fragmentation, parameters
//                                                              in no unit (Plan::unmanaged)
//
// A plan fits when the allocator's model, given the budget, passes the steps that repeat until they reserve
// no more, and never runs out of memory. Releases of the cache are counted: each synchronises the device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan {

// Plan::unmanaged of a plan of this trace.
UnmanagedParameters UnmanagedOf(const Trace& trace, const Plan& plan);

struct FitOptions {
  std::optional<Bytes> budget_bytes;  // not given: what the device has beside `outside`
  Completion completion = Completion::kWaitedFor;
  AddressOrder addresses = AddressOrder::kUpwards;
  bool kernel_temporaries = true;
  bool releases = true;    // false: the replay ends where the cache would be released first
  std::int32_t steps = 0;  // above 0: so many steps, steady or not
};

// Context and NCCL's buffers.
Bytes OutsideBytes(const Plan& plan, const Cluster& cluster);

// The limit of reserved bytes for the plan's buffers: the budget less Plan::unmanaged, at least one byte.
// nullopt: the cluster does not say how much memory a device has.
std::optional<Bytes> AllocatorBudget(const Plan& plan, const FitOptions& options);

// The allocator with the strategy's settings, and its device. kBadInput (/strategy/alloc_conf): PyTorch
// refuses the settings.
Result<ReservedOptions> AllocatorOptions(const Plan& plan, const FitOptions& options);

struct DeviceFit {
  std::optional<Bytes> budget_bytes;  // AllocatorBudget
  Bytes outside_bytes;
  Bytes reserved_bytes;  // its peak within the budget; out of memory: until then
  std::int64_t cache_releases = 0;
  bool out_of_memory = false;
  MemoryPoint out_of_memory_at;
  bool Fits(bool with_releases) const { return !out_of_memory && (with_releases || cache_releases == 0); }
};

// Errors as AllocatorOptions.
Result<DeviceFit> FitDevice(const Plan& plan, const FitOptions& options = {});

// ... of a replay that was made with AllocatorOptions(plan, options).
DeviceFit FitOf(const Plan& plan, const FitOptions& options, const ReservedMemory& replayed);

// The peak to show a reader: of `fit`, or where it is out of memory, of a device without end that is never
// behind (one that is always behind never gives back memory that waits for another stream).
Bytes ReservedToShow(const Plan& plan, FitOptions options, const DeviceFit& fit);

// The reserved bytes on a device of unlimited memory. Errors as AllocatorOptions.
Result<Bytes> ReservedWithoutBudget(const Plan& plan, FitOptions options);

// Why the plan fits on no number of ranks: what more ranks do not divide (activations; with them gathered
// parameters and their gradients; parameters in no unit) needs more than the budget. "": it may fit, or the
// budget is unknown.
std::string WhyNoRanksFit(const Plan& plan, const FitOptions& options);

}  // namespace shardplan
