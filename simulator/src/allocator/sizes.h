// SPDX-License-Identifier: Apache-2.0
// Size classes of LibTorch's caching allocators (c10/core/AllocatorConfig.h).
#pragma once

#include <cstdint>

#include "shardplan/schemas/quantity.h"

namespace shardplan {

inline constexpr std::int64_t kSmallBytes = 1 << 20;         // the largest request of the small pool
inline constexpr std::int64_t kSmallSegmentBytes = 2 << 20;  // segment and page of the small pool
inline constexpr std::int64_t kMinLargeAllocBytes =
    10 << 20;  // from here on a request has a segment of its own ...
inline constexpr std::int64_t kRoundLargeBytes = 2 << 20;  // ... of a multiple of this

constexpr bool IsSmall(std::int64_t rounded_bytes) { return rounded_bytes <= kSmallBytes; }

}  // namespace shardplan
