// SPDX-License-Identifier: Apache-2.0
// Every value of the small floating-point types, and the numbers between them.
#include "executor/src/replay/small_floats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace shardplan::executor {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool infinity;
};

// The value that the bits mean, by the definition.
double Meaning(const Format& f, std::uint32_t bits) {
  const std::uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const std::uint32_t exponent = (bits >> f.mantissa_bits) & ((1u << f.exponent_bits) - 1);
  const std::uint32_t all_ones = (1u << f.exponent_bits) - 1;
  const double sign = ((bits >> (f.mantissa_bits + f.exponent_bits)) & 1) != 0 ? -1 : 1;
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  if (f.infinity && exponent == all_ones) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (!f.infinity && exponent == all_ones && mantissa == (1u << f.mantissa_bits) - 1) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(1 + std::ldexp(mantissa, -f.mantissa_bits), static_cast<int>(exponent) - bias);
}

template <typename T>
void CheckAll(const Format& f) {
  const std::uint32_t count = 1u << (1 + f.exponent_bits + f.mantissa_bits);
  for (std::uint32_t bits = 0; bits < count; ++bits) {
    const T value = T::OfBits(static_cast<decltype(value.bits())>(bits));
    const double meaning = Meaning(f, bits);
    const auto converted = static_cast<float>(value);
    if (std::isnan(meaning)) {
      ASSERT_TRUE(std::isnan(converted)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(T(converted)))) << bits;
      continue;
    }
    ASSERT_EQ(converted, meaning) << bits;
    ASSERT_EQ(T(converted).bits(), bits);
    // Between it and the next one: the nearer, at the same distance the even one.
    const double next = Meaning(f, bits + 1);
    if (bits + 1 >= count / 2 || !std::isfinite(next) || !std::isfinite(meaning)) continue;
    const auto middle = static_cast<float>((meaning + next) / 2);
    if (middle != (meaning + next) / 2) continue;  // bfloat16: not a float
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(T(middle).bits(), even) << bits;
    ASSERT_EQ(T(std::nextafter(middle, 0.0f)).bits(), bits);
    ASSERT_EQ(T(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits(), bits + 1);
  }
}

TEST(SmallFloatsTest, BFloat16) { CheckAll<BFloat16>({8, 7, true}); }
TEST(SmallFloatsTest, Float16) { CheckAll<Float16>({5, 10, true}); }
TEST(SmallFloatsTest, Float8E4M3FN) { CheckAll<Float8E4M3FN>({4, 3, false}); }
TEST(SmallFloatsTest, Float8E5M2) { CheckAll<Float8E5M2>({5, 2, true}); }

TEST(SmallFloatsTest, WhatIsTooLargeBecomesInfinityOrNotANumber) {
  EXPECT_EQ(static_cast<float>(Float16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(Float16(65520.0f))));
  EXPECT_EQ(static_cast<float>(Float8E4M3FN(464.0f)), 448.0f);
  EXPECT_TRUE(std::isnan(static_cast<float>(Float8E4M3FN(480.0f))));
  EXPECT_TRUE(std::isinf(static_cast<float>(Float8E5M2(-1e9f))));
  EXPECT_TRUE(std::isinf(static_cast<float>(BFloat16(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace shardplan::executor
