// SPDX-License-Identifier: Apache-2.0
// Device: the memory, streams, events and kernels that the replayer replays a plan on. One Device serves one
// rank.
//
// [Note: what the backends have in common]
// The replayer decides everything when it is made: which buffer is cut how, which element goes where. A
// backend only executes. Differences between buffers of a sharded, gathered or flat layout have become a list
// of runs of elements (CopySpec), so that no backend knows what a unit is. On the hot path a call carries ids
// only.
//
// Everything with a stream is asynchronous: it runs after what was issued before on that stream, and after
// the events that the stream was made to wait for, and in no other order (cpu: at once, except collectives).
// Allocate, Free and MakeAlias take effect in host order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan::executor {

// How many bytes of device memory are allocated, as the allocator is asked for them. Each allocation is
// rounded up as the CUDA caching allocator rounds. Any thread may allocate and free.
class AllocationCount {
 public:
  static constexpr std::int64_t kGranularityBytes = 512;

  AllocationCount() = default;
  // With that much allocated already, rounded.
  explicit AllocationCount(Bytes allocated) : now_(allocated.value), peak_(allocated.value) {}

  void Allocated(std::int64_t requested) {
    const std::int64_t rounded = Rounded(requested);
    const std::int64_t now = now_.fetch_add(rounded) + rounded;
    for (std::int64_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
  }
  void Freed(std::int64_t requested) { now_ -= Rounded(requested); }
  Bytes now() const { return {now_.load()}; }
  // The most that was allocated at once since this was asked last.
  Bytes TakePeak() {
    const std::int64_t now = now_;
    return {std::max(peak_.exchange(now), now)};
  }
  static std::int64_t Rounded(std::int64_t bytes) {
    return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  }

 private:
  std::atomic<std::int64_t> now_{0};
  std::atomic<std::int64_t> peak_{0};
};

// A static arena: every buffer of a plan at an address of its own, the same in every step.
//
// [Note: what may share an address]
// Two buffers share memory when they are never alive at the same time, in any step, and were allocated on the
// same stream: the rule of a caching allocator's pools, so that what holds of a plan there holds here. If a
// plan's free names further streams (safe_after), whoever gets the address next waits for what they were
// given until then.
//
// Not in the arena: what outlives the plan's frees because a user may hold it (sharded gradients and the
// reduced ones that become them), what autograd allocates, the persistent shards, and host memory.
enum class MemorySource : std::uint8_t {
  kAllocator,  // LibTorch's caching allocator
  kArena,
};

struct ArenaLayout {
  std::int64_t size_bytes = 0;
  // By BufferId: the buffer's first byte in the arena, -1: it is not in it. Its parts follow one another,
  // each at a multiple of kArenaAlignment.
  std::vector<std::int64_t> offsets;
  // By BufferId: the buffers whose memory overlaps with it, ascending.
  std::vector<std::vector<BufferId>> sharers;
};

inline constexpr std::int64_t kArenaAlignment = 512;

// Bytes of the arena that a buffer takes, and where in them its part begins.
std::int64_t ArenaBytes(const Buffer& buffer);
std::int64_t ArenaPartOffset(const Buffer& buffer, std::int32_t part);

// Deterministic. About as large as what of each stream is alive at once.
ArenaLayout LayOutArena(const Plan& plan);

using CopyId = std::int32_t;

// A stretch of one stream that a StepRecorder asks about, by a number of its choice.
using SpanId = std::int32_t;
// On the host's steady clock. -1: it was never begun.
struct SpanTimes {
  std::int64_t begin_ns = -1;
  std::int64_t end_ns = -1;
  bool operator==(const SpanTimes&) const = default;
};
// Now, on that clock.
std::int64_t SteadyNanoseconds();

// rows x row_numel elements from part src_part of one buffer to part dst_part of another. Offsets and strides
// (distance of two rows) are in elements of the respective buffer.
struct CopyRun {
  std::int32_t src_part = 0;
  std::int32_t dst_part = 0;
  std::int64_t src_offset = 0;
  std::int64_t dst_offset = 0;
  std::int64_t rows = 1;
  std::int64_t row_numel = 0;
  std::int64_t src_stride = 0;
  std::int64_t dst_stride = 0;
  bool operator==(const CopyRun&) const = default;
};

// Elements of dst that no run writes and that are set to zero (padding of a reduce-scatter input).
struct ZeroRun {
  std::int32_t part = 0;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  bool operator==(const ZeroRun&) const = default;
};

// One copy of the program, prepared once and issued every step. Elements are converted when the dtypes
// differ, rounding to nearest even. Runs do not overlap in dst.
struct CopySpec {
  BufferId src = -1;
  BufferId dst = -1;
  DType src_dtype = DType::kFloat32;
  DType dst_dtype = DType::kFloat32;
  std::vector<CopyRun> runs;
  std::vector<ZeroRun> zeros;
  bool operator==(const CopySpec&) const = default;
};

class Device {
 public:
  virtual ~Device() = default;

  // Called once by Replayer::Create before anything else: makes the streams and events, and the persistent
  // buffers, zero-filled, except those that were already supplied. The plan outlives the device.
  virtual Status Prepare(const Plan& plan) = 0;
  virtual Result<CopyId> PrepareCopy(CopySpec spec) = 0;

  // Memory of all parts of a buffer that is not alive; its content is undefined. It belongs to `stream`'s
  // pool.
  virtual Status Allocate(BufferId buffer, StreamId stream) = 0;
  // Gives the memory back, in host order: work issued later on the allocation's stream may get it at once,
  // and after the work issued so far on the streams in `safe_after` is done.
  virtual Status Free(BufferId buffer, std::span<const StreamId> safe_after) = 0;
  // The same of these parts. The buffer stays, and is not used, until it is freed.
  virtual Status FreeParts(BufferId buffer, std::span<const std::int32_t> parts,
                           std::span<const StreamId> safe_after) = 0;
  // `copy.dst`, not alive, becomes a name of the parts of `copy.src` that the copy would read (same dtype;
  // contiguous runs, one per part of dst). The memory lives until both are freed.
  virtual Status MakeAlias(CopyId copy) = 0;

  virtual Status Copy(CopyId copy, StreamId stream) = 0;
  // dst += src along the runs, in dst's dtype.
  virtual Status Accumulate(CopyId copy, StreamId stream) = 0;
  // Every element /= divisor.
  virtual Status Scale(BufferId buffer, double divisor, StreamId stream) = 0;

  virtual Status Record(EventId event, StreamId stream) = 0;
  // The stream's later work runs after the latest record of the event (not recorded yet: kInternal).
  virtual Status Wait(EventId event, StreamId stream) = 0;
  // True when the latest record has been reached; false: not yet, call again (only the virtual device, whose
  // work runs when its machine is told to; the others block). kEnvironment: a collective failed or timed out
  // meanwhile.
  virtual Result<bool> HostWait(EventId event) = 0;
  // Blocks until all streams are done. Same result as HostWait.
  virtual Result<bool> Synchronize() = 0;

  // ---- for a StepRecorder (step_recorder.h), and never called without one; kUsage: the device has no clock
  // ---- Room for spans 0 to `spans` - 1. Earlier ones are forgotten. May wait for the device.
  virtual Status PrepareSpans(std::int64_t spans);
  // A span begins where the stream is done with what was issued before, and can begin with what comes; it
  // ends where the stream is done with what was issued in between. Stream -1: the host's own work.
  virtual Status BeginSpan(SpanId span, StreamId stream);
  // The same where nothing was issued to the stream since the end of span `ended`: there it begins.
  virtual Status ContinueSpan(SpanId span, SpanId ended, StreamId stream);
  virtual Status EndSpan(SpanId span, StreamId stream);
  // Waits for the end of the span.
  virtual Result<SpanTimes> TimesOf(SpanId span);
};

}  // namespace shardplan::executor
