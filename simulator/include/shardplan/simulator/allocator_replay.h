// SPDX-License-Identifier: Apache-2.0
// Replaying a recorded log of the CUDA caching allocator through the model, action by action
// (docs/internals/allocator.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

enum class LogActionKind : std::uint8_t {
  kAlloc,
  kFree,           // requested and completed
  kFreeRequested,  // the block may have to wait for other streams ...
  kFreeCompleted,  // ... and is free from here on
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,
  kSegmentUnmap,
  kOom,       // the request failed; `address` is the device's free memory
  kSnapshot,  // nothing happens
};
// "alloc", "free_requested", "segment_alloc", ...: as in the log.
std::string_view Name(LogActionKind kind);

struct LogAction {
  LogActionKind kind = LogActionKind::kAlloc;
  DeviceAddress address = 0;
  Bytes size_bytes;          // as requested; of segments: whole
  std::int32_t stream = -1;  // index into AllocatorLog::streams; -1: the log does not say
  bool operator==(const LogAction&) const = default;
};

struct AllocatorLog {
  std::string about;
  AllocatorSettings settings;
  std::optional<Bytes> device_bytes;  // where the log says how much memory the device has
  std::vector<std::int64_t> streams;  // as the log names them, ascending: the model's streams are indices
  bool streams_told = false;          // every request says its stream
  std::vector<CachingAllocator::InitialSegment> initial_segments;
  std::vector<LogAction> actions;
  std::optional<Bytes> final_reserved_bytes;
  std::vector<std::string> notes;  // what was in the file and has no effect
};

// kBadInput with JSON pointer, what was found and what was expected. The format is described in
// docs/internals/allocator.md.
Result<AllocatorLog> ParseAllocatorLog(std::string_view json_text);
Result<AllocatorLog> ReadAllocatorLog(const std::string& path);

// The first action that the model does differently.
struct AllocatorDeparture {
  std::int64_t action = 0;            // index into AllocatorLog::actions; their number: after the last one
  std::string model;                  // what the model does there
  std::string log;                    // what the log says
  std::vector<SegmentView> segments;  // of the model: those that hold an address of either
};

struct AllocatorReplay {
  std::int64_t actions = 0;     // of the log
  std::int64_t reproduced = 0;  // before the first departure
  std::optional<AllocatorDeparture> departure;
  std::vector<Bytes> reserved_bytes;  // after each reproduced action
  Bytes initial_reserved_bytes;
  AllocatorStats stats;                 // after the last reproduced request
  std::vector<SegmentView> memory_map;  // likewise
  // Expandable segments only: a size of the device with which more is reproduced, where the log does not say
  // it.
  std::optional<Bytes> inferred_device_bytes;
  bool streams_searched = false;  // streams of new segments were found by trying: the log does not say them
};

// Replays the requests (alloc and free rows) and compares everything else with what the model does: which
// address each request gets, each segment row with its address, size and place in the order, reserved bytes
// after every row. The log gives the facts that only the machine knows: addresses of new segments, when a
// cudaMalloc failed, when a deferred free completed, when the program emptied the cache. kBadInput: the
// initial state contradicts itself.
Result<AllocatorReplay> ReplayAllocatorLog(const AllocatorLog& log);

// For people: the settings, how much was reproduced, reserved bytes, and the first departure with the rows
// around it and the memory map of the segments it concerns.
std::string ReplayText(const AllocatorLog& log, const AllocatorReplay& replay);
// The same for programs: one JSON object (docs/internals/allocator.md).
std::string ReplayJson(const AllocatorLog& log, const AllocatorReplay& replay);

}  // namespace shardplan
