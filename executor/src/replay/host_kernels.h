// SPDX-License-Identifier: Apache-2.0
// The small kernels on host memory, for the backends whose memory the host can touch (cpu, virtual).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "shardplan/executor/device.h"
#include "shardplan/schemas/dtype.h"

namespace shardplan::executor {

// First byte of each part of a buffer.
using PartPointers = std::span<std::byte* const>;

// dst = src along the runs, elements converted as torch converts them (to nearest even), and the zeros.
void CopyOnHost(const CopySpec& copy, PartPointers src, PartPointers dst);
// dst += src along the runs: the sum in dst's dtype (bfloat16 and float16: in float, then rounded).
void AccumulateOnHost(const CopySpec& copy, PartPointers src, PartPointers dst);
// Divides, as torch's div_ by a number does.
void DivideOnHost(std::byte* data, std::int64_t numel, DType dtype, double divisor);
// dst = the sum of `inputs` inputs of `stride` elements each, of which the first `numel` count, over
// `divisor`.
void ReduceOnHost(const std::byte* src, std::int64_t inputs, std::int64_t stride, std::byte* dst,
                  std::int64_t numel, DType dtype, double divisor);
// Floating point: NaN; integers: a pattern.
void PoisonOnHost(std::byte* data, std::int64_t bytes);

// Element `index` as a double / set from one. For models that are made of numbers only (tests, filler).
double LoadElement(const std::byte* data, DType dtype, std::int64_t index);
void StoreElement(std::byte* data, DType dtype, std::int64_t index, double value);

}  // namespace shardplan::executor
