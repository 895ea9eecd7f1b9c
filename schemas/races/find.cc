// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include "races/blocks.h"
#include "races/order.h"
#include "races/shadow.h"
#include "shardplan/races/races.h"

namespace shardplan {
namespace {

class Search {
 public:
  explicit Search(const Recording& recording)
      : recording_(recording), order_(recording), blocks_(recording.streams.size()) {}

  RaceReport Run() {
    for (std::size_t i = 0; i < recording_.events.size(); ++i) {
      number_ = static_cast<std::int64_t>(i);
      std::visit(
          [&]<typename Event>(const Event& event) {
            On(event);
            if constexpr (requires { event.thread; } && !kKeepsLearned<Event>)
              order_.ForgetLearned(event.thread);
            if constexpr (std::is_same_v<Event, IssuedCopy>) NoteCopy(event);
          },
          recording_.events[i]);
    }
    // A pair that races in this run needs no other one.
    std::erase_if(report_.races, [&](const Race& race) {
      return race.kind == RaceKind::kFreedEarly && pairs_.contains({race.first.event, race.second.event});
    });
    report_.unknown_kernels.assign(unknown_.begin(), unknown_.end());
    return std::move(report_);
  }

 private:
  using Pair = std::pair<std::int64_t, std::int64_t>;

  // Events of torch's code that has been told that work is over.
  template <typename Event>
  static constexpr bool kKeepsLearned =
      std::is_same_v<Event, HostLearned> || std::is_same_v<Event, BlockFreed> ||
      std::is_same_v<Event, BlockHeld> || std::is_same_v<Event, MemoryReleased> ||
      std::is_same_v<Event, BlockUsed>;
  // Memory of the host that a copy names is pinned, reserved before the recording began or not.
  void NoteCopy(const IssuedCopy& event) {
    const bool from_host = event.direction == CopyDirection::kHostToDevice;
    const bool to_host = event.direction == CopyDirection::kDeviceToHost;
    if ((from_host && !event.reads.empty()) || (to_host && !event.writes.empty())) {
      order_.CopiedPinned(event.thread);
    }
  }
  void On(const IssuedLaunch& event) {
    (void)order_.Issue(event.thread, event.stream);
    ++report_.unknown_launches;
    unknown_.insert(event.name);
  }
  // Kernels, copies, memsets and collectives.
  template <typename Work>
  requires requires(Work work) {
    work.stream;
    work.writes;
  }
  void On(const Work& event) {
    const std::int32_t tick = order_.Issue(event.thread, event.stream);
    if constexpr (requires { event.reads; }) Touch(event, tick, event.reads, false);
    Touch(event, tick, event.writes, true);
  }
  void On(const HostOperator& event) {
    for (const bool writes : {false, true}) {
      for (const MemoryRegion& region : writes ? event.writes : event.reads) {
        const RacingAccess access{number_, writes, region};
        ++report_.accesses;
        shadow_.Look(access, [&](const Access& earlier, std::int64_t begin, std::int64_t end) {
          const Clock& over = order_.KnownOfPinned(event.thread);
          if (earlier.tick <= over[static_cast<std::size_t>(earlier.stream)]) return;
          AddRace({.kind = RaceKind::kHost, .first = earlier.what, .second = access}, begin, end);
        });
      }
    }
  }
  void On(const MemoryReserved& event) {
    segments_[event.address] = {event.address + event.size_bytes.value, event.device};
  }
  void On(const MemoryReleased& event) {
    const auto segment = segments_.find(event.address);
    if (segment == segments_.end()) return;
    const auto [end, device] = segment->second;
    for (std::int32_t d = 0; device < 0 && d < kMostDevices; ++d) order_.On(event, d);
    if (device >= 0) order_.On(event, device);
    shadow_.Forget(event.address, end);
    segments_.erase(segment);
  }
  void On(const BlockAllocated& event) { blocks_.On(event, number_, order_); }
  void On(const BlockFreed& event) { blocks_.On(event, number_, order_, shadow_); }
  void On(const BlockHeld& event) { blocks_.On(event, order_); }
  void On(const BlockUsed&) {}  // it shows when the block is freed
  void On(const PhaseEnded&) {}
  void On(const auto& event) { order_.On(event); }

  void Touch(const auto& event, std::int32_t tick, const std::vector<MemoryRegion>& regions, bool writes) {
    const RecordedId stream = event.stream;
    for (const MemoryRegion& region : regions) {
      ++report_.accesses;
      const Access access{stream, tick, {number_, writes, region}};
      shadow_.Add(access, [&](const Access& earlier, std::int64_t begin, std::int64_t end) {
        if (earlier.tick <= order_.OfStream(stream)[static_cast<std::size_t>(earlier.stream)]) return;
        // The bytes may be of several blocks, each with an owner of its own.
        for (std::int64_t at = begin; at < end; at = blocks_.BorderBehind(at, end)) {
          Meet(earlier, access, event.thread, at, blocks_.BorderBehind(at, end));
        }
      });
      Block* block = blocks_.Of(region.address);
      if (block != nullptr && !block->early.empty()) MeetEarly(access, *block);
    }
  }

  bool IsPinned(std::int64_t address) const {
    auto segment = segments_.upper_bound(address);
    if (segment == segments_.begin()) return false;
    --segment;
    return address < segment->second.first && segment->second.second < 0;
  }

  void AddRace(Race race, std::int64_t begin, std::int64_t end) {
    std::set<Pair>& pairs = race.kind == RaceKind::kFreedEarly ? early_pairs_ : pairs_;
    if (!pairs.insert({race.first.event, race.second.event}).second) return;
    race.begin = begin;
    race.bytes = end - begin;
    report_.races.push_back(std::move(race));
  }

  // An access that the streams do not order behind an earlier one, at this byte.
  void Meet(const Access& earlier, const Access& access, RecordedId thread, std::int64_t at,
            std::int64_t end) {
    const auto of = static_cast<std::size_t>(earlier.stream);
    const Block* block = blocks_.Of(at);
    if (block != nullptr && earlier.tick <= block->ready[of]) return;
    if (!OverlapIn(earlier.what.region, access.what.region, at, end)) return;
    // torch's allocator of pinned memory asks before it hands memory out, which is not recorded.
    if (IsPinned(at) && earlier.tick <= order_.KnownOfPinned(thread)[of]) return;
    Race race{.first = earlier.what, .second = access.what};
    if (block != nullptr && earlier.what.event < block->allocated) {
      race.kind = RaceKind::kReused;
      race.allocated = block->allocated;
      race.freed = Blocks::FreeBefore(*block, at);
    }
    AddRace(std::move(race), at, end);
  }

  // The first accesses to a block: it could have been one of those that were freed.
  void MeetEarly(const Access& access, Block& block) {
    const Clock& over = order_.OfStream(access.stream);
    for (const EarlyFree& early : block.early) {
      const auto of = static_cast<std::size_t>(early.access.stream);
      const bool is_over = early.access.stream == access.stream || early.access.tick <= over[of];
      if (is_over || (!early.access.what.writes && !access.what.writes)) continue;
      const MemoryRegion& region = early.access.what.region;
      AddRace({.kind = RaceKind::kFreedEarly,
               .first = early.access.what,
               .second = access.what,
               .freed = early.freed,
               .allocated = block.allocated},
              region.address, region.address + SpanBytes(region));
    }
    block.early.clear();
  }

  static constexpr std::int32_t kMostDevices = 64;

  const Recording& recording_;
  Order order_;
  Shadow shadow_;
  Blocks blocks_;
  std::map<std::int64_t, std::pair<std::int64_t, std::int32_t>>
      segments_;  // end and device, by the first byte
  std::set<Pair> pairs_, early_pairs_;
  std::set<std::string> unknown_;
  std::int64_t number_ = 0;
  RaceReport report_;
};

}  // namespace

RaceReport FindRaces(const Recording& recording) { return Search(recording).Run(); }

}  // namespace shardplan
