// SPDX-License-Identifier: Apache-2.0
// A plan's allocations in the caching allocator: reserved bytes, fragmentation, addresses
// (docs/reference/memory.md). The model of the allocator serves the history's requests (caching_allocator.h).
//
// [Note: frees that wait for a stream]
// A free with `safe_after` (record_stream) is finished when the device has passed the point of the free on
// those streams. When that is depends on the device's speed, and the replay has no clock: it gives both
// bounds. A device that is behind (kWaitedFor) has done only what the program makes certain: a host_wait on
// an event, and everything that was waited for before that event was recorded; and the step's end, where the
// device is idle. A device that is never behind (kAtOnce) has done everything before the next request.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/caching_allocator.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {

enum class Completion : std::uint8_t { kWaitedFor, kAtOnce };

struct ReservedOptions {
  Completion completion = Completion::kWaitedFor;
  AddressOrder addresses = AddressOrder::kUpwards;
  AllocatorSettings settings;
  Bytes device_bytes{std::int64_t{1} << 50};  // memory of the device
  Bytes other_bytes;                          // what the process cannot get: context, NCCL's buffers
  bool record_addresses = false;              // keep `placements` and `segments`
  bool record_stats = false;                  // keep `stats`
  bool stop_at_release = false;               // the replay ends at the first request that releases the cache
};

// The address range of a block. size_bytes is 0 for a request of 0 bytes and for one that ran out of memory.
struct BlockPlacement {
  DeviceAddress address = 0;
  Bytes size_bytes;  // of the allocator's block
  bool operator==(const BlockPlacement&) const = default;
};

// Memory taken from the driver at one action of the history and given back at another.
struct SegmentLife {
  DeviceAddress address = 0;
  Bytes size_bytes;
  StreamId stream = 0;
  std::int32_t from = 0;  // index of the action
  std::int32_t to = -1;   // -1: still there at the end
  bool operator==(const SegmentLife&) const = default;
};

struct ReservedMemory {
  Bytes peak_reserved_bytes;  // over everything, the first step included
  Bytes peak_allocated_bytes;
  Bytes allocated_at_peak_bytes;  // when the reserved peak was reached
  Bytes end_reserved_bytes;
  MemoryPoint peak_at;       // of the first action with the reserved peak
  std::int64_t retries = 0;  // requests that first had to release the cache
  bool out_of_memory = false;
  MemoryPoint out_of_memory_at;  // the replay ends there
  std::vector<SegmentView> map_at_peak;
  std::vector<BlockPlacement> placements;  // by block
  std::vector<SegmentLife> segments;
  std::vector<AllocatorStats> stats;  // after each action of the history
  // The part of the reserved peak that is not allocated, parts per million.
  std::int64_t FragmentationPpm() const;
};

// Deterministic.
ReservedMemory ReserveMemory(const Plan& plan, const MemoryHistory& history,
                             const ReservedOptions& options = {});

// ... of a training that goes on: the steps that repeat are passed again until a pass reserves no more than
// the one before (at most eight times). A limit of memory, or a device that is behind, may change the first
// passes for a time only.
struct SteadyReplay {
  ReservedMemory reserved;  // over all passes
  MemoryHistory history;    // of all passes; what is before the last one is not recorded
  AllocatorStats end;
};
// `steps` above 0: so many in all, steady or not.
SteadyReplay ReplayUntilSteady(const Plan& plan, MemoryHistoryOptions history, const ReservedOptions& options,
                               std::int32_t steps = 0);

// The same replay with what the allocator says at each row of the last pass.
struct SteadyReserved {
  ReservedMemory reserved;
  MemoryHistory history;
  std::vector<MemoryRow> rows;          // of the last pass, of plan.steady_step
  std::vector<AllocatorStats> at_rows;  // the allocator's statistics at each of them
  AllocatorStats end;                   // calls of the driver: since the first step began
};
SteadyReserved ReserveUntilSteady(const Plan& plan, MemoryHistoryOptions history,
                                  const ReservedOptions& options, std::int32_t steps = 0);

// One line of PYTORCH_CUDA_ALLOC_CONF and what it makes of the same history.
struct SettingsTrial {
  AllocatorSettings settings;
  std::string text;  // "expandable_segments:True"
  Bytes peak_reserved_bytes;
  std::int64_t retries = 0;
  bool out_of_memory = false;
};

// Settings that people turn, each over `options.settings`, in the order of docs/reference/memory.md.
std::vector<SettingsTrial> TryAllocatorSettings(const Plan& plan, const MemoryHistory& history,
                                                const ReservedOptions& options = {});

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
