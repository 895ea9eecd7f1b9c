// SPDX-License-Identifier: Apache-2.0
// The state of a replay of an allocator log, and the driver that answers as the log says.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "allocator/sizes.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan::allocator_replay {

// A new segment, or address space of an expandable one, of a request whose stream the log does not say.
struct StreamChoice {
  std::size_t row = 0;  // that made it
  std::int32_t stream = -1;
};
using StreamsByRow = std::map<std::size_t, std::int32_t>;

// Addresses that belong to a stream.
struct StreamRange {
  DeviceAddress end = 0;
  StreamChoice of;
  bool chosen = false;  // the log does not say it
};

// The state of a replay: a value, so that another reading of the same rows can start from a copy.
struct State {
  explicit State(const AllocatorSettings& settings) : allocator(settings) {}

  CachingAllocator allocator;
  std::unordered_map<DeviceAddress, BlockId> live;  // blocks handed out; looked up, never iterated
  std::size_t cursor = 0;                           // the next row that is not reproduced yet
  Bytes log_reserved;                               // what the rows before it add up to
  std::vector<Bytes> reserved;                      // after each of them
  std::optional<AllocatorDeparture> departure;
  bool opened_address_space = false;  // by the last request
  // The streams of segments, by address, for requests that do not say theirs.
  std::map<DeviceAddress, StreamRange> ranges;
  std::optional<StreamChoice> choice;          // of the request that is replayed
  std::optional<DeviceAddress> model_address;  // that the departure is about

  const StreamRange* RangeAt(DeviceAddress address) const {
    auto range = ranges.upper_bound(address);
    if (range == ranges.begin()) return nullptr;
    --range;
    return address <= range->second.end ? &range->second : nullptr;
  }
};

inline std::string Describe(const LogAction& action) {
  if (action.kind == LogActionKind::kOom)
    return "oom of a request of " + std::to_string(action.size_bytes.value) + " B";
  return std::string(Name(action.kind)) + " of " + std::to_string(action.size_bytes.value) + " B at " +
         std::to_string(action.address);
}

inline std::string Describe(std::string_view what, Bytes size, DeviceAddress address) {
  return std::string(what) + " of " + std::to_string(size.value) + " B at " + std::to_string(address);
}

// Plays the driver by reading the log: it answers what the log says the driver answered, and notes where the
// model asks for something else.
class LogDriver final : public DeviceDriver {
 public:
  LogDriver(const AllocatorLog& log, State& state) : log_(log), state_(state) {}

  std::optional<DeviceAddress> AllocateSegment(Bytes size, std::int32_t stream) override {
    const LogAction* row = Row();
    if (row == nullptr) return Depart("a new segment of " + std::to_string(size.value) + " B");
    if (row->kind == LogActionKind::kSegmentAlloc && row->size_bytes == size &&
        (row->stream < 0 || row->stream == stream)) {
      AddRange(row->address, size, stream);
      return Take(size);
    }
    if (MeansOutOfMemory(row->kind)) return std::nullopt;
    return Depart("a new segment of " + std::to_string(size.value) + " B");
  }

  void FreeSegment(DeviceAddress address, Bytes size) override {
    if (Expect(LogActionKind::kSegmentFree, address, size, -size.value)) state_.ranges.erase(address);
  }

  // A new address space begins with the first page that is mapped in it.
  DeviceAddress ReserveAddresses(Bytes size, std::int32_t stream) override {
    state_.opened_address_space = true;
    const LogAction* row = Row();
    if (row == nullptr || row->kind != LogActionKind::kSegmentMap) return 0;
    AddRange(row->address, size, stream);
    return row->address;
  }
  void FreeAddresses(DeviceAddress address, Bytes) override { state_.ranges.erase(address); }

  bool MapPages(DeviceAddress address, Bytes size) override {
    const LogAction* row = Row();
    if (row != nullptr && MeansOutOfMemory(row->kind)) return false;
    return Expect(LogActionKind::kSegmentMap, address, size, size.value);
  }

  void UnmapPages(DeviceAddress address, Bytes size) override {
    Expect(LogActionKind::kSegmentUnmap, address, size, -size.value);
  }

  Bytes TotalMemory() const override { return log_.device_bytes.value_or(kUnknownDeviceBytes); }

  std::vector<BlockId> Synchronize() override {
    std::vector<BlockId> completed;
    for (const LogAction* row = Row(); row != nullptr && row->kind == LogActionKind::kFreeCompleted;
         row = Row()) {
      const auto block = state_.live.find(row->address);
      if (block == state_.live.end()) {
        Depart("no block there that waits");
        break;
      }
      // A free that was requested before the log began.
      if (state_.allocator.IsAllocated(block->second)) state_.allocator.DeferFree(block->second);
      completed.push_back(block->second);
      state_.live.erase(block);
      Take({0});
    }
    return completed;
  }

 private:
  // The row at the cursor; null after the last one and after a departure.
  const LogAction* Row() const {
    if (state_.departure || state_.cursor == log_.actions.size()) return nullptr;
    return &log_.actions[state_.cursor];
  }

  // The rows that follow a request for memory that failed.
  static bool MeansOutOfMemory(LogActionKind kind) {
    return kind == LogActionKind::kSegmentFree || kind == LogActionKind::kSegmentUnmap ||
           kind == LogActionKind::kFreeCompleted || kind == LogActionKind::kOom;
  }

  // Up to the next range at most: how much address space there is may be a guess.
  void AddRange(DeviceAddress address, Bytes size, std::int32_t stream) {
    if (log_.streams_told) return;
    const auto next = state_.ranges.upper_bound(address);
    DeviceAddress end = address + size.value - 1;
    if (next != state_.ranges.end()) end = std::min(end, next->first - 1);
    const StreamChoice choice = state_.choice.value_or(StreamChoice{0, stream});
    state_.ranges[address] = {end, choice, state_.choice.has_value()};
  }

  DeviceAddress Take(Bytes reserved_change) {
    state_.log_reserved += reserved_change;
    state_.reserved.push_back(state_.log_reserved);
    return log_.actions[state_.cursor++].address;
  }

  bool Expect(LogActionKind kind, DeviceAddress address, Bytes size, std::int64_t reserved_change) {
    const LogAction* row = Row();
    if (row != nullptr && row->kind == kind && row->address == address && row->size_bytes == size) {
      Take({reserved_change});
      return true;
    }
    state_.model_address = address;
    Depart(Describe(Name(kind), size, address));
    return false;
  }

  std::nullopt_t Depart(std::string model) {
    if (!state_.departure) {
      const bool at_end = state_.cursor == log_.actions.size();
      state_.departure = {static_cast<std::int64_t>(state_.cursor),
                          std::move(model),
                          at_end ? "the end of the log" : Describe(log_.actions[state_.cursor]),
                          {}};
    }
    return std::nullopt;
  }

  const AllocatorLog& log_;
  State& state_;
};

}  // namespace shardplan::allocator_replay
