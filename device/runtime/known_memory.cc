// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/known_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace shardplan::softdevice {
namespace {

struct Known {
  std::mutex mutex;
  std::map<std::uintptr_t, std::size_t> bytes;  // by address; ranges do not overlap
  std::atomic<std::size_t> count = 0;           // asked without the lock: mostly there is none
};
Known& TheKnown() {
  static auto* const known = new Known();
  return *known;
}

void Forget(Known& known, std::uintptr_t begin, std::size_t bytes) {
  known.bytes.erase(known.bytes.lower_bound(begin), known.bytes.lower_bound(begin + bytes));
  known.count = known.bytes.size();
}

}  // namespace

void RememberMemory(const void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  Known& known = TheKnown();
  const std::lock_guard lock(known.mutex);
  Forget(known, address, bytes);
  known.bytes[address] = bytes;
  known.count = known.bytes.size();
}

bool IsRemembered(const void* begin, std::size_t bytes) {
  Known& known = TheKnown();
  if (known.count == 0) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::lock_guard lock(known.mutex);
  auto range = known.bytes.upper_bound(address);
  if (range == known.bytes.begin()) return false;
  std::uintptr_t end = address;
  for (--range; range != known.bytes.end() && range->first <= end; ++range) {
    end = std::max(end, range->first + range->second);
    if (address + bytes <= end) return true;
  }
  return false;
}

void ForgetMemory(const void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  constexpr std::size_t kMany = std::size_t{1} << 20, kPage = 4096;
  if (bytes >= kMany) {
    const std::uintptr_t first = (address + kPage - 1) / kPage * kPage;
    (void)madvise(reinterpret_cast<void*>(first), (address + bytes - first) / kPage * kPage, MADV_DONTNEED);
  }
  Known& known = TheKnown();
  if (known.count == 0) return;
  const std::lock_guard lock(known.mutex);
  Forget(known, address, bytes);
}

}  // namespace shardplan::softdevice
