// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "allocator/address_spaces.h"
#include "allocator/replay_state.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

using allocator_replay::Describe;
using allocator_replay::LogDriver;
using allocator_replay::State;
using allocator_replay::StreamChoice;
using allocator_replay::StreamRange;
using allocator_replay::StreamsByRow;

class Replayer {
 public:
  // `streams`: of new segments, by the row that makes them, where the log does not say it.
  explicit Replayer(const AllocatorLog& log, StreamsByRow streams = {})
      : log_(log), streams_(std::move(streams)), state_(log.settings) {}

  Result<AllocatorReplay> Run();
  // After Run: segments whose stream was chosen; one of them may be of another. The segments at the departure
  // come first.
  std::vector<StreamChoice> Suspects() const;
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
  std::int32_t StreamOf(State& state, const LogAction& request) const;
  void ReplayFree();
  void Complete(State& state) const;
  void Depart(State& state, std::string model) const;
  void Advance(State& state) const {
    state.reserved.push_back(state.log_reserved);
    ++state.cursor;
  }

  const AllocatorLog& log_;
  const StreamsByRow streams_;
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
    if (log_.streams_told) continue;
    state_.ranges[segment.address] = {segment.address + segment.size_bytes.value - 1, {0, segment.stream}};
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

// If the log has no stream, the block's segment decides it. A new segment is taken to be of the first stream
// on which the model has no cached block for the request either (but see [Note: streams of new segments]).
std::int32_t Replayer::StreamOf(State& state, const LogAction& request) const {
  state.choice.reset();
  if (request.stream >= 0) return request.stream;
  const StreamRange* range = state.RangeAt(request.address);
  if (request.kind == LogActionKind::kAlloc && range != nullptr) return range->of.stream;
  StreamChoice choice{.row = state.cursor};
  if (const auto told = streams_.find(choice.row); told != streams_.end()) {
    choice.stream = told->second;
  } else {
    for (choice.stream = 0; choice.stream < std::ssize(log_.streams); ++choice.stream) {
      if (!state.allocator.HasCachedBlock(request.size_bytes, choice.stream)) break;
    }
    if (choice.stream == std::ssize(log_.streams)) choice.stream = 0;
  }
  state.choice = choice;
  return choice.stream;
}

std::vector<StreamChoice> Replayer::Suspects() const {
  std::vector<StreamChoice> suspects;
  const auto add = [&](const StreamRange* range) {
    if (range != nullptr && range->chosen) suspects.push_back(range->of);
  };
  if (!state_.departure) return suspects;
  if (state_.choice) suspects.push_back(*state_.choice);
  if (state_.model_address) add(state_.RangeAt(*state_.model_address));
  if (state_.cursor < log_.actions.size()) add(state_.RangeAt(log_.actions[state_.cursor].address));
  if (log_.streams.size() > 1) {  // a release visits all
    for (const auto& [address, range] : state_.ranges) add(&range);
  }
  return suspects;
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
  const BlockId block = state.allocator.Allocate(row.size_bytes, StreamOf(state, row), driver);
  if (state.departure) return;
  if (block == kNoBlock) {
    if (state.cursor == request && row.kind == LogActionKind::kOom) return Advance(state);
    return Depart(state, "out of memory for a request of " + std::to_string(row.size_bytes.value) + " B");
  }
  if (block == kEmptyBlock) return Advance(state);
  const DeviceAddress address = state.allocator.Address(block);
  if (state.cursor != request || row.kind != LogActionKind::kAlloc || address != row.address) {
    state.model_address = address;
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
// begins, depends on the size of the device. If the log does not say it and the replay departs, it is
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

// [Note: streams of new segments] Which stream a new segment is for shows later, when the model and the log
// disagree on a block in it: then the segment that the model took, or the one that the log did, is of another
// stream. Each is tried on every stream and on one more than is known, and what reproduces most is kept.
constexpr std::int64_t kMaxRowsReplayed = 30'000'000;

Result<AllocatorReplay> SearchStreams(const AllocatorLog& log, std::vector<StreamChoice> suspects,
                                      AllocatorReplay best) {
  StreamsByRow streams;
  std::int32_t known = static_cast<std::int32_t>(log.streams.size());
  std::int64_t rows = 0;
  for (bool better = true; better && best.departure;) {
    better = false;
    for (const StreamChoice& suspect : std::vector(suspects)) {
      for (std::int32_t stream = 0; stream <= known && !better; ++stream) {
        if (stream == suspect.stream) continue;
        if (rows > kMaxRowsReplayed) return best;
        StreamsByRow tried = streams;
        tried[suspect.row] = stream;
        Replayer replayer(log, tried);
        Result<AllocatorReplay> replay = replayer.Run();
        if (!replay) return replay;
        rows += replay->reproduced;
        if (replay->departure && replay->reproduced <= best.reproduced) continue;
        better = true;
        known = std::max(known, stream + 1);
        streams = std::move(tried);
        best = std::move(*replay);
        suspects = replayer.Suspects();
      }
      if (better) break;
    }
  }
  best.streams_searched = !streams.empty();
  return best;
}

}  // namespace

Result<AllocatorReplay> ReplayAllocatorLog(const AllocatorLog& log) {
  Replayer replayer(log);
  Result<AllocatorReplay> replay = replayer.Run();
  if (!replay || !replay->departure) return replay;
  if (!log.streams_told) {
    Result<AllocatorReplay> searched = SearchStreams(log, replayer.Suspects(), *replay);
    // If the state before is of one stream, another one has to explain everything.
    if (!searched || !searched->departure || log.streams.size() > 1) replay = std::move(searched);
    if (!replay || !replay->departure) return replay;
  }
  const bool may_lack_size = !log.device_bytes && log.settings.expandable_segments;
  return may_lack_size ? SearchDeviceSize(log, std::move(*replay)) : replay;
}

}  // namespace shardplan
