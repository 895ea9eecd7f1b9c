#include "cost/fixed_log.h"

#include <bit>

#include "shardplan/schemas/assert.h"

namespace shardplan::internal {
namespace {
__extension__ using Int128 = __int128;
__extension__ using UInt128 = unsigned __int128;
}  // namespace

std::int64_t Log2Fixed(std::int64_t value) {
  const int whole = std::bit_width(static_cast<std::uint64_t>(value)) - 1;
  // The mantissa in [1, 2) with 62 fractional bits; squaring it doubles its logarithm, one bit of the
  // fraction a time.
  std::uint64_t mantissa = static_cast<std::uint64_t>(value) << (62 - whole);
  std::int64_t fraction = 0;
  for (int bit = 0; bit < kLogBits; ++bit) {
    const UInt128 square = static_cast<UInt128>(mantissa) * mantissa;
    const bool past_two = (square >> 125) != 0;
    mantissa = static_cast<std::uint64_t>(square >> (past_two ? 63 : 62));
    fraction = (fraction << 1) | (past_two ? 1 : 0);
  }
  return (static_cast<std::int64_t>(whole) << kLogBits) | fraction;
}

std::int64_t Exp2Fixed(std::int64_t x) {
  const int whole = static_cast<int>(x >> kLogBits);
  const std::uint64_t fraction = static_cast<std::uint64_t>(x) & 0xFFFF'FFFFULL;
  // 2^fraction is the product of 2^(2^-k) over the set bits k; each factor is the square root of the one
  // before.
  UInt128 result = static_cast<UInt128>(1) << 62;
  std::uint64_t root = std::uint64_t{1} << 63;  // 2^1 with 62 fractional bits
  for (int bit = 1; bit <= kLogBits; ++bit) {
    // Integer square root of root * 2^62 by bisection on bits: exact, and only ever run 32 times.
    const UInt128 square = static_cast<UInt128>(root) << 62;
    std::uint64_t guess = 0;
    for (std::uint64_t step = std::uint64_t{1} << 62; step != 0; step >>= 1) {
      const std::uint64_t candidate = guess | step;
      if (static_cast<UInt128>(candidate) * candidate <= square) guess = candidate;
    }
    root = guess;
    if ((fraction >> (kLogBits - bit)) & 1U) result = (result * root) >> 62;
  }
  if (whole >= 62) return static_cast<std::int64_t>(result << (whole - 62));
  const int shift = 62 - whole;
  return static_cast<std::int64_t>((result + (static_cast<UInt128>(1) << (shift - 1))) >> shift);
}

namespace {

// Far above any time or rate that makes sense, and two of them still add up.
std::int64_t Clamped(Int128 value) {
  constexpr Int128 kMost = Int128{1} << 62;
  return static_cast<std::int64_t>(value > kMost ? kMost : value < -kMost ? -kMost : value);
}

}  // namespace

std::int64_t MulDiv(std::int64_t a, std::int64_t b, std::int64_t c) {
  SHARDPLAN_ASSERT(c != 0, "callers divide by sizes and rates that they found not to be zero");
  const Int128 product = static_cast<Int128>(a) * b;
  const Int128 half = c / 2;
  return Clamped((product >= 0 ? product + half : product - half) / c);
}

std::int64_t MulDivUp(std::int64_t a, std::int64_t b, std::int64_t c) {
  SHARDPLAN_ASSERT(c != 0, "callers divide by sizes and rates that they found not to be zero");
  return Clamped((static_cast<Int128>(a) * b + c - 1) / c);
}

}  // namespace shardplan::internal
