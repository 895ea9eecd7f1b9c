// SPDX-License-Identifier: Apache-2.0
// Bytes and Nanoseconds: int64 strong types. They add and compare with their own kind only.
#pragma once

#include <compare>
#include <cstdint>

namespace shardplan {

template <typename Tag>
struct Quantity {
  std::int64_t value = 0;

  constexpr auto operator<=>(const Quantity&) const = default;
  constexpr Quantity& operator+=(Quantity other) {
    value += other.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) {
    value -= other.value;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return {a.value + b.value}; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return {a.value - b.value}; }
  friend constexpr Quantity operator*(Quantity a, std::int64_t n) { return {a.value * n}; }
};

using Bytes = Quantity<struct BytesTag>;
using Nanoseconds = Quantity<struct NanosecondsTag>;

// Every size that LibTorch's caching allocators hand out is a multiple of it (c10/core/AllocatorConfig.h).
inline constexpr std::int64_t kMinBlockBytes = 512;

constexpr std::int64_t RoundUp(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Bytes of a tensor, without settings that round sizes further.
constexpr Bytes InBlocks(Bytes requested) { return {RoundUp(requested.value, kMinBlockBytes)}; }

}  // namespace shardplan
