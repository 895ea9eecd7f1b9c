// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/races/random_recordings.h"

#include <map>
#include <random>
#include <vector>

namespace shardplan::test {
namespace {

class Program {
 public:
  explicit Program(std::uint64_t seed) : engine_(seed) {
    recording_.threads = {{"main", -1}, {"pt_autograd_0", 0}, {"watchdog", -1}};
    recording_.streams = {{0, 0}, {0, -1}, {0, 0}, {1, 0}};
  }

  Recording Run(std::size_t events) {
    while (recording_.events.size() < events) Next();
    return std::move(recording_);
  }

 private:
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  RecordedId Thread() { return static_cast<RecordedId>(Below(3)); }
  RecordedId Stream() { return static_cast<RecordedId>(Below(4)); }
  std::int64_t Event() { return Below(records_); }

  MemoryRegion Region() {
    if (Below(4) == 0) {  // columns of a small matrix
      MemoryRegion region{.dtype = DType::kInt16, .shape = {3, 2}, .strides = {6 + Below(2), 1 + Below(2)}};
      region.address = Below(kArenaBytes - 40);
      return region;
    }
    const std::int64_t bytes = 1 + Below(16);
    return {.address = Below(kArenaBytes - bytes), .dtype = DType::kUInt8, .shape = {bytes}};
  }
  std::vector<MemoryRegion> Regions() {
    std::vector<MemoryRegion> regions(static_cast<std::size_t>(Below(3)));
    for (MemoryRegion& region : regions) region = Region();
    return regions;
  }
  void Add(RecordingEvent event) { recording_.events.push_back(std::move(event)); }

  void Next() {
    switch (Below(14)) {
      case 0:
      case 1:
      case 2:
        return Add(IssuedKernel{Thread(), -1, Stream(), "k", Regions(), Regions(), 0});
      case 3:
        return Add(IssuedMemset{Thread(), -1, Stream(), {Region()}});
      case 4:
      case 5:
        return Add(IssuedRecord{Thread(), -1, Stream(), records_++});
      case 6:
      case 7:
        if (records_ > 0) Add(IssuedWait{Thread(), -1, Stream(), Event()});
        return;
      case 8:
        if (records_ > 0 && Below(2) == 0) Add(HostWaitForEvent{Thread(), -1, Event()});
        if (records_ > 0) Add(HostLearned{Thread(), Event()});
        return;
      case 9:
        if (Below(4) == 0) return Add(HostWaitForDevice{Thread(), -1, static_cast<std::int32_t>(Below(2))});
        return Add(HostWaitForStream{Thread(), -1, Stream()});
      case 10:
        return Below(2) == 0 ? Add(HandOver{Thread(), Below(3)}) : Add(TakeOver{Thread(), Below(3)});
      case 11: {
        const std::int64_t at = Below(6) * 16, bytes = 1 + Below(16);
        if (blocks_.contains(at)) return;
        blocks_[at] = bytes;
        return Add(BlockAllocated{Thread(), -1, Stream(), at, Bytes{bytes}});
      }
      case 12: {
        if (blocks_.empty()) return;
        const auto [at, bytes] = *std::next(blocks_.begin(), Below(std::ssize(blocks_)));
        blocks_.erase(at);
        Add(BlockFreed{Thread(), -1, at, Bytes{bytes}});
        while (Below(3) == 0) Add(BlockHeld{Thread(), Stream(), at});
        return;
      }
      default:
        return Add(HostOperator{Thread(), -1, "h", Regions(), Regions()});
    }
  }

  std::mt19937_64 engine_;
  Recording recording_;
  std::int64_t records_ = 0;
  std::map<std::int64_t, std::int64_t> blocks_;
};

}  // namespace

Recording RandomRaces(std::uint64_t seed, std::size_t events) { return Program(seed).Run(events); }

}  // namespace shardplan::test
