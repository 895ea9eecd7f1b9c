// SPDX-License-Identifier: Apache-2.0
// The address spaces of expandable segments, which a log does not have.
#pragma once

#include <vector>

#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {

// Stands for the size of a device of which a log does not say it: larger than any, so that address space
// never ends.
inline constexpr Bytes kUnknownDeviceBytes{std::int64_t{192} << 30};

// The initial segments of the log, expandable ones joined to one per address space, with its begin and size.
std::vector<CachingAllocator::InitialSegment> InferAddressSpaces(const AllocatorLog& log);

}  // namespace shardplan
