#include "shardplan/simulator/allocator_replay.h"

#include <algorithm>
#include <unordered_map>

#include "allocator_address_spaces.h"
#include "allocator_sizes.h"

namespace shardplan {
namespace {

// What a replay has reached: a value, so that another reading of the same rows can start from a copy.
struct State {
  explicit State(const AllocatorSettings& settings) : allocator(settings) {}

  CachingAllocator allocator;
  std::unordered_map<DeviceAddress, BlockId> live;  // blocks handed out; looked up, never iterated
  std::size_t cursor = 0;                           // the next row that is not reproduced yet
  Bytes log_reserved;                               // what the rows before it add up to
  std::vector<Bytes> reserved;                      // after each of them
  std::optional<AllocatorDeparture> departure;
  bool opened_address_space = false;  // by the last request
};

std::string Describe(const LogAction& action) {
  if (action.kind == LogActionKind::kOom)
    return "oom of a request of " + std::to_string(action.size_bytes.value) + " B";
  return std::string(Name(action.kind)) + " of " + std::to_string(action.size_bytes.value) + " B at " +
         std::to_string(action.address);
}

std::string Describe(std::string_view what, Bytes size, DeviceAddress address) {
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
      return Take(size);
    }
    if (MeansOutOfMemory(row->kind)) return std::nullopt;
    return Depart("a new segment of " + std::to_string(size.value) + " B");
  }

  void FreeSegment(DeviceAddress address, Bytes size) override {
    Expect(LogActionKind::kSegmentFree, address, size, -size.value);
  }

  // A new address space begins with the first page that is mapped in it.
  DeviceAddress ReserveAddresses(Bytes, std::int32_t) override {
    state_.opened_address_space = true;
    const LogAction* row = Row();
    return row != nullptr && row->kind == LogActionKind::kSegmentMap ? row->address : 0;
  }
  void FreeAddresses(DeviceAddress, Bytes) override {}

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

class Replayer {
 public:
  explicit Replayer(const AllocatorLog& log) : log_(log), state_(log.settings) {}

  Result<AllocatorReplay> Run();
  // After Run: the request at which it departed began a new address space.
  bool DepartedInNewAddressSpace() const { return state_.opened_address_space; }

 private:
  // A group of rows [cursor, request): what happened before the next request, and because of it.
  struct Group {
    std::size_t request = 0;  // the alloc or oom row; the first free row or the end if there is none
    bool has_request = false;
    std::size_t completions = 0;  // free_completed rows at its beginning
    bool has_releases = false;    // segment_free or segment_unmap rows
    bool is_plain = true;         // only completions, then an alloc
  };

  // One way to read a group: see [Note: readings].
  struct Reading {
    std::size_t completions = 0;
    bool empties_cache = false;
  };

  Result<Bytes> TakeInitialState();
  Group NextGroup() const;
  void ReplayGroup(const Group& group);
  State Read(State state, const Group& group, Reading reading) const;
  void ReplayRequest(State& state, std::size_t request) const;
  std::int32_t StreamOf(const State& state, const Group& group) const;
  void ReplayFree();
  void Complete(State& state) const;
  void Depart(State& state, std::string model) const;
  void Advance(State& state) const {
    state.reserved.push_back(state.log_reserved);
    ++state.cursor;
  }

  const AllocatorLog& log_;
  State state_;
};

void Replayer::Depart(State& state, std::string model) const {
  if (state.departure) return;
  const bool at_end = state.cursor == log_.actions.size();
  state.departure = {static_cast<std::int64_t>(state.cursor),
                     std::move(model),
                     at_end ? "the end of the log" : Describe(log_.actions[state.cursor]),
                     {}};
}

Result<Bytes> Replayer::TakeInitialState() {
  for (const CachingAllocator::InitialSegment& segment : InferAddressSpaces(log_)) {
    const Result<std::vector<BlockId>> blocks = state_.allocator.AddSegment(segment);
    if (!blocks) return std::unexpected(blocks.error());
    for (std::size_t i = 0; i < blocks->size(); ++i) state_.live[segment.blocks[i].address] = (*blocks)[i];
  }
  state_.log_reserved = state_.allocator.stats().reserved_bytes;
  return state_.log_reserved;
}

Replayer::Group Replayer::NextGroup() const {
  Group group;
  bool leading = true;
  for (group.request = state_.cursor; group.request < log_.actions.size(); ++group.request) {
    const LogActionKind kind = log_.actions[group.request].kind;
    if (kind == LogActionKind::kAlloc || kind == LogActionKind::kOom) group.has_request = true;
    if (kind == LogActionKind::kOom) group.is_plain = false;
    if (group.has_request || kind == LogActionKind::kFree || kind == LogActionKind::kFreeRequested ||
        kind == LogActionKind::kSnapshot) {
      break;
    }
    leading = leading && kind == LogActionKind::kFreeCompleted;
    if (leading) ++group.completions;
    group.has_releases =
        group.has_releases || kind == LogActionKind::kSegmentFree || kind == LogActionKind::kSegmentUnmap;
    group.is_plain = group.is_plain && kind == LogActionKind::kFreeCompleted;
  }
  return group;
}

// Where the log has no stream, the block's segment tells it; a new segment is taken to be of the first stream
// on which the model has no cached block for the request either.
std::int32_t Replayer::StreamOf(const State& state, const Group& group) const {
  const LogAction& request = log_.actions[group.request];
  if (request.stream >= 0) return request.stream;
  for (const SegmentView& segment : state.allocator.MemoryMap()) {
    if (request.kind == LogActionKind::kAlloc && request.address >= segment.address &&
        request.address < segment.address + segment.size_bytes.value) {
      return segment.stream;
    }
  }
  for (std::int32_t stream = 0; stream < static_cast<std::int32_t>(log_.streams.size()); ++stream) {
    if (!state.allocator.HasCachedBlock(request.size_bytes, stream)) return stream;
  }
  return 0;
}

// The free_completed row at the cursor.
void Replayer::Complete(State& state) const {
  const auto block = state.live.find(log_.actions[state.cursor].address);
  if (block == state.live.end()) return Depart(state, "no block there that waits");
  // A free that was requested before the log began.
  if (state.allocator.IsAllocated(block->second)) state.allocator.DeferFree(block->second);
  state.allocator.CompleteFree(block->second);
  state.live.erase(block);
  Advance(state);
}

void Replayer::ReplayRequest(State& state, std::size_t request) const {
  const LogAction& row = log_.actions[request];
  LogDriver driver(log_, state);
  state.opened_address_space = false;
  Group group;
  group.request = request;
  const BlockId block = state.allocator.Allocate(row.size_bytes, StreamOf(state, group), driver);
  if (state.departure) return;
  if (block == kNoBlock) {
    if (state.cursor == request && row.kind == LogActionKind::kOom) return Advance(state);
    return Depart(state, "out of memory for a request of " + std::to_string(row.size_bytes.value) + " B");
  }
  if (block == kEmptyBlock) return Advance(state);
  const DeviceAddress address = state.allocator.Address(block);
  if (state.cursor != request || row.kind != LogActionKind::kAlloc || address != row.address) {
    return Depart(state, Describe("alloc", row.size_bytes, address));
  }
  state.live[address] = block;
  if (state.allocator.stats().reserved_bytes != state.log_reserved) {
    return Depart(state, std::to_string(state.allocator.stats().reserved_bytes.value) + " B reserved, not " +
                             std::to_string(state.log_reserved.value));
  }
  Advance(state);
}

State Replayer::Read(State state, const Group& group, Reading reading) const {
  for (std::size_t i = 0; i < reading.completions && !state.departure; ++i) Complete(state);
  if (reading.empties_cache && !state.departure) {
    LogDriver driver(log_, state);
    state.allocator.ReleaseCached(driver);
  }
  if (state.departure) return state;
  if (group.has_request) {
    ReplayRequest(state, group.request);
  } else if (state.cursor != group.request) {
    Depart(state, "nothing before the next request");
  }
  return state;
}

// [Note: readings] A log says that segments were released, but not why: because the program emptied its
// cache, or because a request found no memory. It says that a deferred free completed, but not whether a
// request found it complete, or had to wait for it while it released the cache. Rows that leave a choice are
// read in each way until one is reproduced; if none is, the departure of the way that gets furthest is
// reported.
void Replayer::ReplayGroup(const Group& group) {
  if (!group.has_releases && (group.is_plain || group.completions == 0)) {
    for (std::size_t i = 0; i < group.completions && !state_.departure; ++i) Complete(state_);
    if (state_.departure) return;
    if (group.has_request) {
      ReplayRequest(state_, group.request);
    } else if (state_.cursor != group.request) {
      Depart(state_, "nothing before the next request");
    }
    return;
  }
  std::optional<State> furthest;
  for (std::size_t completions = group.completions + 1; completions-- > 0;) {
    for (const bool empties_cache : {false, true}) {
      if (!empties_cache && !group.has_request) continue;
      State state = Read(state_, group, {completions, empties_cache});
      const bool reproduced = !state.departure;
      if (!furthest || reproduced || state.cursor > furthest->cursor) furthest = std::move(state);
      if (reproduced) {
        state_ = std::move(*furthest);
        return;
      }
    }
  }
  state_ = std::move(*furthest);
}

void Replayer::ReplayFree() {
  const LogAction& row = log_.actions[state_.cursor];
  const auto block = state_.live.find(row.address);
  if (block == state_.live.end() || !state_.allocator.IsAllocated(block->second)) {
    return Depart(state_, "no allocated block there");
  }
  // Old versions of LibTorch log the size of the block, not of the request.
  const BlockId id = block->second;
  if (row.size_bytes != state_.allocator.Requested(id) && row.size_bytes != state_.allocator.Size(id)) {
    return Depart(state_, Describe("a block", state_.allocator.Requested(id), row.address));
  }
  if (row.kind == LogActionKind::kFreeRequested) {
    state_.allocator.DeferFree(id);
    return Advance(state_);
  }
  state_.allocator.DeferFree(id);
  state_.allocator.CompleteFree(id);
  state_.live.erase(block);
  Advance(state_);
}

// The segments of the model that hold one of the addresses.
std::vector<SegmentView> SegmentsAt(const CachingAllocator& allocator, const LogAction& row) {
  std::vector<SegmentView> found;
  for (SegmentView& segment : allocator.MemoryMap()) {
    const DeviceAddress end = segment.address + segment.size_bytes.value;
    if (row.address >= segment.address && row.address < end) found.push_back(std::move(segment));
  }
  return found;
}

Result<AllocatorReplay> Replayer::Run() {
  AllocatorReplay replay;
  replay.actions = static_cast<std::int64_t>(log_.actions.size());
  const Result<Bytes> initial = TakeInitialState();
  if (!initial) return std::unexpected(initial.error());
  replay.initial_reserved_bytes = *initial;
  state_.reserved.reserve(log_.actions.size());
  while (state_.cursor < log_.actions.size() && !state_.departure) {
    switch (log_.actions[state_.cursor].kind) {
      case LogActionKind::kFree:
      case LogActionKind::kFreeRequested:
        ReplayFree();
        break;
      case LogActionKind::kSnapshot:
        Advance(state_);
        break;
      default:
        ReplayGroup(NextGroup());
    }
  }
  if (!state_.departure && log_.final_reserved_bytes && *log_.final_reserved_bytes != state_.log_reserved) {
    Depart(state_, std::to_string(state_.log_reserved.value) + " B reserved");
    state_.departure->log = std::to_string(log_.final_reserved_bytes->value) + " B as final_reserved_bytes";
  }
  if (state_.departure && state_.cursor < log_.actions.size()) {
    state_.departure->segments = SegmentsAt(state_.allocator, log_.actions[state_.cursor]);
  }
  replay.reproduced = static_cast<std::int64_t>(state_.cursor);
  replay.departure = std::move(state_.departure);
  replay.reserved_bytes = std::move(state_.reserved);
  replay.stats = state_.allocator.stats();
  replay.memory_map = state_.allocator.MemoryMap();
  return replay;
}

// [Note: size of the device] How much address space an expandable segment has, and so when a second one
// begins, depends on the size of the device. Where the log does not say it and the replay departs, it is
// searched for by bisection: a departure at which the model began a new address space says that it was taken
// too small, another too large.
Result<AllocatorReplay> SearchDeviceSize(const AllocatorLog& log, AllocatorReplay best) {
  AllocatorLog sized = log;
  std::int64_t least = 1, most = kUnknownDeviceBytes.value;
  while (most - least > kSmallSegmentBytes) {
    const std::int64_t middle = least + (most - least) / 2;
    sized.device_bytes = Bytes{middle};
    Replayer replayer(sized);
    Result<AllocatorReplay> replay = replayer.Run();
    if (!replay) return replay;
    const bool better = replay->reproduced > best.reproduced || !replay->departure;
    (replayer.DepartedInNewAddressSpace() ? least : most) = middle;
    if (better) {
      best = std::move(*replay);
      best.inferred_device_bytes = sized.device_bytes;
    }
    if (!best.departure) break;
  }
  return best;
}

}  // namespace

Result<AllocatorReplay> ReplayAllocatorLog(const AllocatorLog& log) {
  Result<AllocatorReplay> replay = Replayer(log).Run();
  const bool may_lack_size = !log.device_bytes && log.settings.expandable_segments;
  if (!replay || !replay->departure || !may_lack_size) return replay;
  return SearchDeviceSize(log, std::move(*replay));
}

}  // namespace shardplan
