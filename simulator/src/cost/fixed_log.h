// Base-2 logarithm and power in fixed point: interpolation that gives the same nanosecond on every machine.
#pragma once

#include <cstdint>

namespace shardplan::internal {

// Fractional bits of a fixed-point logarithm.
inline constexpr int kLogBits = 32;

// log2(value) * 2^32, rounded down; value >= 1.
std::int64_t Log2Fixed(std::int64_t value);
// 2^(x / 2^32), rounded to nearest; 0 <= x < 62 * 2^32.
std::int64_t Exp2Fixed(std::int64_t x);
// a * b / c in 128 bits, rounded to nearest, ties away from zero; c > 0.
std::int64_t MulDiv(std::int64_t a, std::int64_t b, std::int64_t c);
// The same, rounded up; all three positive or zero.
std::int64_t MulDivUp(std::int64_t a, std::int64_t b, std::int64_t c);

}  // namespace shardplan::internal
