// SPDX-License-Identifier: Apache-2.0
// How fast kernels are by their class and size.
#pragma once

#include <optional>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::internal {

// The rate of a matrix operator: attention has its own where the device says so. Null: the vector rate.
const ComputeRate* RateOf(const Device& device, const OperatorEvent& event);

// Part of the peak bandwidth that a kernel of so many bytes reaches.
std::int64_t MemoryPpm(const Device& device, Bytes moved);

// Nothing where the rate has no shapes, or the operator is no plain product. The elements of the output
// follow from the bytes written, the inner dimension from them and the FLOPs (2 x output x inner).
std::optional<Nanoseconds> DurationOfShape(const ComputeRate& rate, const OperatorEvent& event);

// The sequence that fused attention works on, by its FLOPs and the bytes that it writes; 0: no attention.
std::int64_t SequenceOf(const OperatorEvent& event);

// The largest of so many values of a standard normal distribution, as expected, in millionths.
std::int64_t SlowestOf(std::int64_t ranks);

}  // namespace shardplan::internal
