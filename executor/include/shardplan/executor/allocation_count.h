// How many bytes of device memory are allocated, as the allocator is asked for them.
#pragma once

#include <atomic>
#include <cstdint>

#include "shardplan/schemas/quantity.h"

namespace shardplan::executor {

// Each allocation is rounded up as the CUDA caching allocator rounds. Any thread may allocate and free.
class AllocationCount {
 public:
  static constexpr std::int64_t kGranularityBytes = 512;

  void Allocated(std::int64_t requested) { now_ += Rounded(requested); }
  void Freed(std::int64_t requested) { now_ -= Rounded(requested); }
  Bytes now() const { return {now_.load()}; }

 private:
  static std::int64_t Rounded(std::int64_t bytes) {
    return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  }
  std::atomic<std::int64_t> now_{0};
};

}  // namespace shardplan::executor
