// SPDX-License-Identifier: Apache-2.0
// Device memory is address space of this process, of a set capacity; pages come when they are touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace shardplan::softdevice {

constexpr unsigned char kPoison = 0xFF;  // NaN in every floating dtype, -1 in integers

class Memory {
 public:
  static Memory& Get();

  enum class Kind { kDevice, kPinned };
  struct Range {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    Kind kind = Kind::kDevice;
    int device = 0;
    bool owned = true;  // by Allocate or AllocatePinned
  };

  // Null: no room.
  void* Allocate(int device, std::size_t bytes);
  void* AllocatePinned(std::size_t bytes);
  // False: nothing of the kind begins there.
  bool Free(void* pointer, Kind kind);
  // Memory that exists already.
  bool Register(void* pointer, const Range& range);
  bool Unregister(void* pointer);

  // The allocation that holds the byte.
  std::optional<Range> Find(const void* pointer);
  // True: all `bytes` are in one allocation, or (neither end is in any) in the host's own memory.
  bool Holds(const void* pointer, std::size_t bytes);

  bool Reserve(int device, std::size_t bytes);
  void Release(int device, std::size_t bytes);
  std::size_t Available(int device);

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, Range> ranges_;
  std::map<int, std::size_t> used_;
};

// Writes the poison, unless the settings say not to.
void Poison(void* pointer, std::size_t bytes);

}  // namespace shardplan::softdevice
