// SPDX-License-Identifier: Apache-2.0
#include "cost/fixed_log.h"

#include <algorithm>
#include <bit>

#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/cost_model.h"

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

std::int64_t Limited(std::int64_t time_ns) { return std::min(time_ns, kLongestStep.value); }

std::int64_t TimeAt(std::int64_t amount, std::int64_t rate_per_second) {
  if (rate_per_second <= 0 || amount <= 0) return 0;
  return Limited(MulDivUp(amount, 1'000'000'000, rate_per_second));
}

}  // namespace shardplan::internal
