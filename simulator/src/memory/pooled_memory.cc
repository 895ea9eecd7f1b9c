#include "shardplan/simulator/pooled_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "memory/memory_actions.h"

namespace shardplan {
namespace {

class PoolPeaks final : public internal::MemoryActions {
 public:
  explicit PoolPeaks(const Plan& plan) : plan_(plan) {}

  void Act(const MemoryBlock& block, bool frees, const MemoryPoint&) override {
    constexpr std::int64_t kGranularity = 512;
    const std::int64_t bytes = (block.requested_bytes.value + kGranularity - 1) / kGranularity * kGranularity;
    Count(pools_[PoolOf(block)], frees ? -bytes : bytes);
    Count(all_, frees ? -bytes : bytes);
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
  static void Count(Level& level, std::int64_t bytes) {
    level.now += bytes;
    level.peak = std::max(level.peak, level.now);
  }

  const Plan& plan_;
  std::map<Pool, Level> pools_;
  Level all_;
};

}  // namespace

PooledMemory PoolMemory(const Plan& plan) {
  PoolPeaks peaks(plan);
  internal::ForEachMemoryAction(plan, {}, peaks);
  return peaks.Take();
}

}  // namespace shardplan
