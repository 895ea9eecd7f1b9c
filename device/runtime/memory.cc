// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>

#include "device/runtime/settings.h"

namespace shardplan::softdevice {
namespace {

constexpr std::size_t kPage = 4096;
// cudaMalloc takes memory of a device in these units.
constexpr std::size_t kUnit = std::size_t{2} << 20;
std::size_t Units(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }
std::size_t Pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* Map(std::size_t bytes, std::uintptr_t hint = 0) {
  void* pointer = mmap(reinterpret_cast<void*>(hint), Pages(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pointer == MAP_FAILED ? nullptr : pointer;
}

// Device memory goes downwards in a part of the address space where nothing else is: of free blocks of one
// size the caching allocator takes the lowest, so what it does must not depend on the gaps of the process.
constexpr std::uintptr_t kHighest = std::uintptr_t{0x6000} << 32, kLowest = std::uintptr_t{0x4000} << 32;
std::uintptr_t NextHint(std::size_t bytes) {
  static std::atomic<std::uintptr_t> next = kHighest;
  const std::uintptr_t hint = next.fetch_sub(Units(bytes)) - Units(bytes);
  return hint >= kLowest && hint < kHighest ? hint : 0;
}

}  // namespace

void Poison(void* pointer, std::size_t bytes) {
  if (TheSettings().poison) std::memset(pointer, kPoison, bytes);
}

Memory& Memory::Get() {
  static Memory* const memory = new Memory();
  return *memory;
}

bool Memory::Reserve(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Units(bytes) > TheSettings().capacity_bytes - used_[device]) return false;
  used_[device] += Units(bytes);
  return true;
}

void Memory::Release(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  used_[device] -= Units(bytes);
}

std::size_t Memory::Available(int device) {
  const std::lock_guard lock(mutex_);
  return TheSettings().capacity_bytes - used_[device];
}

void* Memory::Allocate(int device, std::size_t bytes) {
  if (!Reserve(device, bytes)) return nullptr;
  void* pointer = Map(bytes, NextHint(bytes));
  if (pointer == nullptr) {
    Release(device, bytes);
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  ranges_[begin] = {begin, bytes, Kind::kDevice, device, true};
  return pointer;
}

void* Memory::AllocatePinned(std::size_t bytes) {
  void* pointer = Map(bytes);
  if (pointer == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  ranges_[begin] = {begin, bytes, Kind::kPinned, 0, true};
  return pointer;
}

bool Memory::Free(void* pointer, Kind kind) {
  Range range;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == ranges_.end() || found->second.kind != kind || !found->second.owned) return false;
    range = found->second;
    ranges_.erase(found);
  }
  if (kind == Kind::kDevice) Release(range.device, range.bytes);
  (void)munmap(pointer, Pages(range.bytes));
  return true;
}

bool Memory::Register(void* pointer, const Range& range) {
  if (Find(pointer)) return false;
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  ranges_[begin] = range;
  ranges_[begin].begin = begin;
  ranges_[begin].owned = false;
  return true;
}

bool Memory::Unregister(void* pointer) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == ranges_.end() || found->second.owned) return false;
  ranges_.erase(found);
  return true;
}

std::optional<Memory::Range> Memory::Find(const void* pointer) {
  const std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto found = ranges_.upper_bound(address);
  if (found == ranges_.begin()) return std::nullopt;
  --found;
  if (address - found->second.begin >= found->second.bytes) return std::nullopt;
  return found->second;
}

bool Memory::Holds(const void* pointer, std::size_t bytes) {
  if (bytes == 0) return true;
  const auto* last = static_cast<const char*>(pointer) + bytes - 1;
  const std::optional<Range> begin = Find(pointer);
  const std::optional<Range> end = Find(last);
  if (!begin || !end) return !begin && !end;
  return begin->begin == end->begin || begin->begin + begin->bytes == end->begin;
}

}  // namespace shardplan::softdevice
