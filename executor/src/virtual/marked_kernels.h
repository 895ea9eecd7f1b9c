// SPDX-License-Identifier: Apache-2.0
// The kernels of host_kernels.h on marks: where would poison be, had the numbers been computed?
#pragma once

#include <span>

#include "shardplan/executor/device.h"
#include "virtual/memory.h"

namespace shardplan::executor {

// First byte of each part of a buffer.
using PartPlaces = std::span<const Place>;

// An element of dst is poison exactly if its element of src is.
void CopyMarks(const CopySpec& copy, PartPlaces src, PartPlaces dst);
// ... or if it was before.
void AccumulateMarks(const CopySpec& copy, PartPlaces src, PartPlaces dst);

// Adds the marks of `bytes` bytes from `src` on to those that begin at `dst`.
void AddMarks(const PoisonMarks& src, std::int64_t src_offset, std::int64_t bytes, PoisonMarks& dst,
              std::int64_t dst_offset);

}  // namespace shardplan::executor
