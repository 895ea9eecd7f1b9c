// SPDX-License-Identifier: Apache-2.0
// How many bytes of device memory are allocated, as the allocator is asked for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "shardplan/schemas/quantity.h"

namespace shardplan::executor {

// Each allocation is rounded up as the CUDA caching allocator rounds. Any thread may allocate and free.
class AllocationCount {
 public:
  static constexpr std::int64_t kGranularityBytes = 512;

  AllocationCount() = default;
  // With that much allocated already, rounded.
  explicit AllocationCount(Bytes allocated) : now_(allocated.value), peak_(allocated.value) {}

  void Allocated(std::int64_t requested) {
    const std::int64_t rounded = Rounded(requested);
    const std::int64_t now = now_.fetch_add(rounded) + rounded;
    for (std::int64_t peak = peak_; peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
  }
  void Freed(std::int64_t requested) { now_ -= Rounded(requested); }
  Bytes now() const { return {now_.load()}; }
  // The most that was allocated at once since this was asked last.
  Bytes TakePeak() {
    const std::int64_t now = now_;
    return {std::max(peak_.exchange(now), now)};
  }
  static std::int64_t Rounded(std::int64_t bytes) {
    return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  }

 private:
  std::atomic<std::int64_t> now_{0};
  std::atomic<std::int64_t> peak_{0};
};

}  // namespace shardplan::executor
