// SPDX-License-Identifier: Apache-2.0
// Base-2 logarithm in fixed point, and fractions: interpolation that gives the same nanosecond on every
// machine.
#pragma once

#include <cstdint>

namespace shardplan::internal {

// Fractional bits of a fixed-point logarithm.
inline constexpr int kLogBits = 32;

// log2(value) * 2^32, rounded down; value >= 1.
std::int64_t Log2Fixed(std::int64_t value);
// a * b / c in 128 bits, rounded to nearest, ties away from zero; c > 0.
std::int64_t MulDiv(std::int64_t a, std::int64_t b, std::int64_t c);
// The same, rounded up; all three positive or zero.
std::int64_t MulDivUp(std::int64_t a, std::int64_t b, std::int64_t c);

// A step that takes longer is refused where it is lowered.
std::int64_t Limited(std::int64_t time_ns);
// Time to do `amount` at `rate_per_second`, up; a rate of zero costs nothing.
std::int64_t TimeAt(std::int64_t amount, std::int64_t rate_per_second);

}  // namespace shardplan::internal
