// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <utility>

#include "memory/sink.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {
namespace {

class PoolPeaks final : public internal::MemorySink {
 public:
  explicit PoolPeaks(const Plan& plan) : plan_(plan) {}

  std::int32_t Allocate(const MemoryBlock& block, const MemoryPoint&) override {
    Count(PoolOf(block), block.requested_bytes, false);
    return -1;
  }
  std::int32_t AllocateForModel(const internal::ModelMemory& memory, UnitId, std::int32_t,
                                const MemoryPoint&) override {
    Count({memory.stream, -1}, memory.requested_bytes, false);
    return -1;
  }
  void Free(const MemoryBlock& block, const MemoryPoint&) override {
    Count(PoolOf(block), block.requested_bytes, true);
  }
  void FreeOfModel(const internal::ModelMemory& memory, const MemoryPoint&) override {
    Count({memory.stream, -1}, memory.requested_bytes, true);
  }
  void BeginRecorded() override {}

  PooledMemory Take() const {
    PooledMemory memory{.allocated_bytes = {all_.peak}};
    for (const auto& [pool, level] : pools_) memory.pooled_bytes.value += level.peak;
    return memory;
  }

 private:
  struct Level {
    std::int64_t now = 0;
    std::int64_t peak = 0;
  };
  // The stream, or the communicator whose own pool it is.
  using Pool = std::pair<StreamId, CommunicatorId>;

  Pool PoolOf(const MemoryBlock& block) const {
    if (block.buffer < 0) return {block.stream, -1};
    const CommunicatorId own = plan_.buffers[static_cast<std::size_t>(block.buffer)].pool;
    return {own < 0 ? block.stream : -1, own};
  }
  void Count(Pool pool, Bytes requested, bool frees) {
    constexpr std::int64_t kGranularity = 512;
    const std::int64_t bytes = (requested.value + kGranularity - 1) / kGranularity * kGranularity;
    if (last_ == nullptr || last_pool_ != pool) {
      last_ = &pools_[pool];
      last_pool_ = pool;
    }
    Count(*last_, frees ? -bytes : bytes);
    Count(all_, frees ? -bytes : bytes);
  }
  static void Count(Level& level, std::int64_t bytes) {
    level.now += bytes;
    level.peak = std::max(level.peak, level.now);
  }

  const Plan& plan_;
  std::map<Pool, Level> pools_;
  Level* last_ = nullptr;  // the pool of the last action: most are of one
  Pool last_pool_;
  Level all_;
};

}  // namespace

PooledMemory PoolMemory(const Plan& plan) {
  PoolPeaks peaks(plan);
  internal::WalkMemory(plan, {}, peaks);
  return peaks.Take();
}

}  // namespace shardplan
