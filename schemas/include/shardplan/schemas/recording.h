// SPDX-License-Identifier: Apache-2.0
// The recording: what one rank of a job gave to its devices (docs/reference/recording-format.md).
//
// `shardplan rehearse --record` writes it. The events are in the order in which the host issued them, over
// all its threads. Addresses are those of the process; a number of an event (of a stream) is of one record of
// it: an event that is recorded again has another number.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Indices into Recording::threads, ::streams, ::places and ::communicators. -1: none.
using RecordedId = std::int32_t;

struct RecordedThread {
  std::string name;  // "main", "pt_autograd_0"
  RecordedId works_for =
      -1;  // the thread that waits while this one works: autograd's works for the one in a backward
  bool operator==(const RecordedThread&) const = default;
};

struct RecordedStream {
  std::int32_t device = 0;
  std::int32_t priority = 0;  // as CUDA has it: lower numbers go first
  std::int32_t number = -1;   // of the device: 0 is its default stream; -1: not known
  bool operator==(const RecordedStream&) const = default;
};

struct RecordedFrame {
  std::string file;
  std::int32_t line = 0;
  std::string function;  // qualified name
  bool operator==(const RecordedFrame&) const = default;
};

// The lines of the program that issued something.
struct RecordedPlace {
  std::vector<RecordedFrame> frames;  // of Python, innermost first; empty: no Python ran in the thread
  std::string module;                 // FQN of the module whose forward runs; "": none
  std::string node;                   // the node of autograd whose backward runs, "MmBackward0"; "": none
  RecordedId forward = -1;            // the place of that node's forward
  bool operator==(const RecordedPlace&) const = default;
};

struct RecordedCommunicator {
  std::int64_t size = 1;
  std::int64_t rank = 0;            // this one's, in it
  std::string name;                 // the group's description; "": not known
  std::vector<std::int64_t> ranks;  // of the job, in the group's order; empty: not known
  bool operator==(const RecordedCommunicator&) const = default;
};

// Memory that is read or written.
struct MemoryRegion {
  std::int64_t address = 0;
  DType dtype = DType::kUInt8;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements; empty: without gaps, in any order of dimensions
  bool operator==(const MemoryRegion&) const = default;
};
// From the first byte to behind the last.
std::int64_t SpanBytes(const MemoryRegion& region);
// Whether two regions have a byte in common. Elements count, not spans: two columns of a matrix have none.
bool Overlap(const MemoryRegion& a, const MemoryRegion& b);
// The same for the bytes from `begin` to before `end` alone.
bool OverlapIn(const MemoryRegion& a, const MemoryRegion& b, std::int64_t begin, std::int64_t end);

// ---- events ----
// Work of a stream. `thread` and `place` issued it.
struct IssuedKernel {
  RecordedId thread = -1, place = -1, stream = -1;
  std::string name;  // of torch's operator, "aten::mm"
  std::vector<MemoryRegion> reads, writes;
  std::int64_t flops = 0;
  bool operator==(const IssuedKernel&) const = default;
};
// A kernel that no operator of torch launched: which memory it reads and writes is not known.
struct IssuedLaunch {
  RecordedId thread = -1, place = -1, stream = -1;
  std::string name;
  bool operator==(const IssuedLaunch&) const = default;
};
enum class CopyDirection : std::uint8_t { kHostToDevice, kDeviceToHost, kDeviceToDevice, kHostToHost };
struct IssuedCopy {
  RecordedId thread = -1, place = -1, stream = -1;
  CopyDirection direction = CopyDirection::kDeviceToDevice;
  Bytes size_bytes;
  // Memory of a device and pinned memory. A copy from pageable memory is staged before it is issued; one to
  // it is followed by the host's wait.
  std::vector<MemoryRegion> reads, writes;
  bool operator==(const IssuedCopy&) const = default;
};
struct IssuedMemset {
  RecordedId thread = -1, place = -1, stream = -1;
  std::vector<MemoryRegion> writes;
  bool operator==(const IssuedMemset&) const = default;
};
struct IssuedCollective {
  RecordedId thread = -1, place = -1, stream = -1;
  CollectiveKind kind = CollectiveKind::kAllGather;
  RecordedId communicator = -1;
  DType dtype = DType::kUInt8;
  Bytes size_bytes;  // as of the measured tables (collective_kinds.h)
  std::vector<MemoryRegion> reads, writes;
  std::int32_t peer = -1;   // send, recv: the other rank of the communicator
  std::int32_t batch = -1;  // what is issued as one group has one number
  bool operator==(const IssuedCollective&) const = default;
};
// An event of CUDA is recorded on a stream.
struct IssuedRecord {
  RecordedId thread = -1, place = -1, stream = -1;
  std::int64_t event = -1;
  bool operator==(const IssuedRecord&) const = default;
};
// A stream waits for a recorded event.
struct IssuedWait {
  RecordedId thread = -1, place = -1, stream = -1;
  std::int64_t event = -1;
  bool operator==(const IssuedWait&) const = default;
};

// The host waits; or the program asks, and is told that it is over.
struct HostWaitForEvent {
  RecordedId thread = -1, place = -1;
  std::int64_t event = -1;
  bool operator==(const HostWaitForEvent&) const = default;
};
// torch's own code is told that a recorded event is over, and gives up what it held until then.
struct HostLearned {
  RecordedId thread = -1;
  std::int64_t event = -1;
  bool operator==(const HostLearned&) const = default;
};
struct HostWaitForStream {
  RecordedId thread = -1, place = -1, stream = -1;
  bool operator==(const HostWaitForStream&) const = default;
};
struct HostWaitForDevice {
  RecordedId thread = -1, place = -1;
  std::int32_t device = 0;
  bool operator==(const HostWaitForDevice&) const = default;
};

// An operator of the host touches pinned memory.
struct HostOperator {
  RecordedId thread = -1, place = -1;
  std::string name;
  std::vector<MemoryRegion> reads, writes;
  bool operator==(const HostOperator&) const = default;
};
// One thread says, and another learns, that everything before it is over: a queue's element, a future's
// result, the start and the end of a thread.
struct HandOver {
  RecordedId thread = -1;
  std::int64_t object = 0;
  bool operator==(const HandOver&) const = default;
};
struct TakeOver {
  RecordedId thread = -1;
  std::int64_t object = 0;
  bool operator==(const TakeOver&) const = default;
};

// Memory that the driver gives and takes.
struct MemoryReserved {
  std::int64_t address = 0;
  Bytes size_bytes;
  std::int32_t device = -1;  // -1: pinned memory of the host
  bool operator==(const MemoryReserved&) const = default;
};
// The host waits for the whole device.
struct MemoryReleased {
  RecordedId thread = -1;
  std::int64_t address = 0;
  bool operator==(const MemoryReleased&) const = default;
};
// torch's caching allocator hands a block out for a stream, and is given it back.
struct BlockAllocated {
  RecordedId thread = -1, place = -1, stream = -1;
  std::int64_t address = 0;
  Bytes size_bytes;
  bool operator==(const BlockAllocated&) const = default;
};
struct BlockFreed {
  RecordedId thread = -1, place = -1;
  std::int64_t address = 0;
  Bytes size_bytes;
  bool is_behind = false;  // the place is the last that the thread was known to be at, before it
  bool operator==(const BlockFreed&) const = default;
};
// Tensor.record_stream: the block is used on another stream than its own.
struct BlockUsed {
  RecordedId thread = -1, place = -1, stream = -1;
  std::int64_t address = 0;
  bool operator==(const BlockUsed&) const = default;
};
// The allocator keeps a block that was freed until what the stream has is over.
struct BlockHeld {
  RecordedId thread = -1, stream = -1;
  std::int64_t address = 0;
  bool operator==(const BlockHeld&) const = default;
};
// A stretch of a step ends here: "forward", "backward", "optimizer" of a step from 1, or "setup" (step 0).
struct PhaseEnded {
  std::string phase;
  std::int32_t step = 0;
  bool operator==(const PhaseEnded&) const = default;
};

using RecordingEvent =
    std::variant<IssuedKernel, IssuedLaunch, IssuedCopy, IssuedMemset, IssuedCollective, IssuedRecord,
                 IssuedWait, HostWaitForEvent, HostLearned, HostWaitForStream, HostWaitForDevice,
                 HostOperator, HandOver, TakeOver, MemoryReserved, MemoryReleased, BlockAllocated, BlockFreed,
                 BlockUsed, BlockHeld, PhaseEnded>;

struct Recording {
  std::string job;            // the command, for people
  std::string recorded_with;  // "torch 2.15.0"
  std::string device;         // its name
  std::int64_t rank = 0;
  std::int64_t world_size = 1;
  std::vector<RecordedThread> threads;
  std::vector<RecordedStream> streams;
  std::vector<RecordedPlace> places;
  std::vector<RecordedCommunicator> communicators;
  std::vector<RecordingEvent> events;
  bool operator==(const Recording&) const = default;
};

}  // namespace shardplan
