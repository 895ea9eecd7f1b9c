// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/races/naive_races.h"

#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace shardplan::test {
namespace {

// A node of the graph is an event, or what a thread knows ("thread 0", "learned 0"), a record, an object, the
// memory of a free. Names that change get a new node for each change, behind the one before.
class Graph {
 public:
  explicit Graph(const Recording& recording) : recording_(recording) {
    for (std::size_t i = 0; i < recording.events.size(); ++i) {
      event_ = i;
      std::visit(
          [&]<typename Event>(const Event& event) {
            On(event);
            // An answer that torch has been given counts for blocks that it frees next.
            constexpr bool frees = std::is_same_v<Event, HostLearned> || std::is_same_v<Event, BlockFreed> ||
                                   std::is_same_v<Event, BlockHeld>;
            if constexpr (requires { event.thread; } && !frees) {
              learned_[Thread(event.thread)] = threads_[Thread(event.thread)];
            }
          },
          recording.events[i]);
    }
  }

  bool IsBefore(std::size_t earlier, std::size_t later) const {
    return reaches_[later].contains(EventNode(earlier));
  }
  // Was the event over when the block that holds the byte at `later` was handed out, by the allocator's own
  // rule?
  bool IsOverForOwner(std::size_t earlier, std::size_t later, std::int64_t byte) const {
    const auto block = BlockAt(later, byte);
    if (!block) return false;
    for (const int freed : block->frees) {
      if (known_[static_cast<std::size_t>(freed)].contains(EventNode(earlier))) return true;
    }
    return false;
  }
  bool IsKnownToHost(std::size_t earlier, std::size_t later) const {
    return host_[later].contains(EventNode(earlier));
  }

 private:
  using Past = std::set<int>;  // events
  struct Block {
    std::int64_t begin = 0, end = 0;
    RecordedId stream = 0;
    std::size_t from = 0, to = static_cast<std::size_t>(-1);
    std::vector<int> frees;  // indices into known_, of what it was made of
  };

  static int EventNode(std::size_t event) { return static_cast<int>(event); }
  std::size_t Thread(RecordedId id) const {
    const RecordedId of = recording_.threads[static_cast<std::size_t>(id)].works_for;
    return static_cast<std::size_t>(of < 0 ? id : of);
  }
  static void Merge(Past& into, const Past& from) { into.insert(from.begin(), from.end()); }

  void Work(RecordedId thread, RecordedId stream) {
    Past& past = streams_[stream];
    Merge(past, threads_[Thread(thread)]);
    reaches_[event_] = past;
    past.insert(EventNode(event_));
  }
  void On(const IssuedKernel& event) { Work(event.thread, event.stream); }
  void On(const IssuedMemset& event) { Work(event.thread, event.stream); }
  void On(const IssuedRecord& event) {
    Merge(streams_[event.stream], threads_[Thread(event.thread)]);
    records_[event.event] = streams_[event.stream];
  }
  void On(const IssuedWait& event) { Merge(streams_[event.stream], records_[event.event]); }
  void HostWaits(RecordedId thread, const Past& past) {
    Merge(threads_[Thread(thread)], past);
    Merge(learned_[Thread(thread)], past);
  }
  void On(const HostWaitForEvent& event) { HostWaits(event.thread, records_[event.event]); }
  void On(const HostLearned& event) { Merge(learned_[Thread(event.thread)], records_[event.event]); }
  void On(const HostWaitForStream& event) { HostWaits(event.thread, streams_[event.stream]); }
  void On(const HostWaitForDevice& event) {
    for (const auto& [stream, past] : std::map(streams_)) {
      if (recording_.streams[static_cast<std::size_t>(stream)].device == event.device)
        HostWaits(event.thread, past);
    }
  }
  void On(const HandOver& event) { Merge(objects_[event.object], threads_[Thread(event.thread)]); }
  void On(const TakeOver& event) { HostWaits(event.thread, objects_[event.object]); }
  void On(const HostOperator& event) { host_[event_] = threads_[Thread(event.thread)]; }
  void On(const BlockAllocated& event) {
    Block block{event.address, event.address + event.size_bytes.value, event.stream,
                event_,        static_cast<std::size_t>(-1),           {}};
    for (std::int64_t byte = block.begin; byte < block.end; ++byte) {
      if (freed_bytes_.contains(byte)) block.frees.push_back(freed_bytes_[byte]);
      freed_bytes_.erase(byte);
    }
    blocks_.push_back(block);
  }
  void On(const BlockFreed& event) {
    for (Block& block : blocks_) {
      if (block.begin != event.address || block.to != static_cast<std::size_t>(-1)) continue;
      block.to = event_;
      Past known = learned_[Thread(event.thread)];
      for (const int freed : block.frees) Merge(known, known_[static_cast<std::size_t>(freed)]);
      known_.push_back(std::move(known));
      for (std::int64_t byte = block.begin; byte < block.end; ++byte) {
        freed_bytes_[byte] = static_cast<int>(known_.size()) - 1;
      }
    }
  }
  void On(const BlockHeld& event) {
    const auto freed = freed_bytes_.find(event.address);
    if (freed != freed_bytes_.end())
      Merge(known_[static_cast<std::size_t>(freed->second)], streams_[event.stream]);
  }
  void On(const auto&) {}

  const Block* BlockAt(std::size_t event, std::int64_t byte) const {
    for (const Block& block : blocks_) {
      if (block.from < event && event < block.to && block.begin <= byte && byte < block.end) return &block;
    }
    return nullptr;
  }

  const Recording& recording_;
  std::size_t event_ = 0;
  mutable std::map<std::size_t, Past> reaches_, host_;
  std::map<RecordedId, Past> streams_;
  std::map<std::size_t, Past> threads_, learned_;
  std::map<std::int64_t, Past> records_;
  std::map<std::int64_t, Past> objects_;
  std::vector<Block> blocks_;
  std::vector<Past> known_;
  std::map<std::int64_t, int> freed_bytes_;

 public:
  const Past& PastOf(std::size_t event) const { return reaches_[event]; }
};

struct Touch {
  std::size_t event;
  bool writes;
  bool host;
  RecordedId stream;
};

}  // namespace

std::set<std::int64_t> BytesOf(const MemoryRegion& region) {
  std::set<std::int64_t> bytes;
  const std::int64_t size = SizeBytes(region.dtype);
  std::vector<std::int64_t> strides = region.strides;
  if (strides.empty()) {
    strides.assign(region.shape.size(), 1);
    for (std::size_t d = region.shape.size(); d-- > 1;) strides[d - 1] = strides[d] * region.shape[d];
  }
  std::vector<std::int64_t> offsets = {0};
  for (std::size_t d = 0; d < region.shape.size(); ++d) {
    std::vector<std::int64_t> next;
    for (const std::int64_t offset : offsets) {
      for (std::int64_t i = 0; i < region.shape[d]; ++i) next.push_back(offset + i * strides[d]);
    }
    offsets = std::move(next);
  }
  for (const std::int64_t offset : offsets) {
    for (std::int64_t byte = 0; byte < size; ++byte) bytes.insert(region.address + offset * size + byte);
  }
  return bytes;
}

NaiveRaces FindNaively(const Recording& recording) {
  const Graph graph(recording);
  std::map<std::int64_t, std::vector<Touch>> touches;
  for (std::size_t i = 0; i < recording.events.size(); ++i) {
    std::visit(
        [&](const auto& event) {
          const auto add = [&](const std::vector<MemoryRegion>& regions, bool writes) {
            for (const MemoryRegion& region : regions) {
              RecordedId stream = -1;
              if constexpr (requires { event.stream; }) stream = event.stream;
              for (const std::int64_t byte : BytesOf(region))
                touches[byte].push_back({i, writes, stream < 0, stream});
            }
          };
          if constexpr (requires { event.reads; }) add(event.reads, false);
          if constexpr (requires { event.writes; }) add(event.writes, true);
        },
        recording.events[i]);
  }
  NaiveRaces races;
  for (const auto& [byte, list] : touches) {
    for (const Touch& later : list) {
      for (const Touch& earlier : list) {
        if (earlier.event >= later.event || earlier.host || !(earlier.writes || later.writes)) continue;
        const bool ordered = later.host
                                 ? graph.IsKnownToHost(earlier.event, later.event)
                                 : graph.PastOf(later.event).contains(static_cast<int>(earlier.event)) ||
                                       graph.IsOverForOwner(earlier.event, later.event, byte);
        if (ordered) continue;
        races.pairs.emplace(earlier.event, later.event);
        races.bytes.insert(byte);
      }
    }
  }
  return races;
}

}  // namespace shardplan::test
