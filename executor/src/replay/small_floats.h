// SPDX-License-Identifier: Apache-2.0
// Floating-point types of 8 and 16 bits as torch has them: stored as bits, converted from float to nearest
// even.
#pragma once

#include <bit>
#include <cstdint>

namespace shardplan::executor {

// kInfinity: the largest exponent means infinity and NaN, as in IEEE 754; without, only all bits set is NaN
// ("fn": finite), and what is too large becomes NaN.
template <typename Bits, int kExponentBits, int kMantissaBits, bool kInfinity>
class SmallFloat {
 public:
  SmallFloat() = default;
  explicit SmallFloat(float value) : bits_(FromFloat(value)) {}
  template <typename T>
  explicit SmallFloat(T value) : SmallFloat(static_cast<float>(value)) {}

  explicit operator float() const {
    if constexpr (kDropped == 16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits_) << 16);
    const std::uint32_t magnitude = bits_ & kMagnitudeMask;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits_ & ~kMagnitudeMask) << kSignShift;
    if (magnitude >= kFirstNotANumber) return std::bit_cast<float>(sign | 0x7FC00000u);
    if (kInfinity && magnitude == kLargestExponent) return std::bit_cast<float>(sign | 0x7F800000u);
    if (magnitude >= kSmallestNormal) {
      return std::bit_cast<float>(sign | ((magnitude << kDropped) + (kBiasDifference << 23)));
    }
    const float value = static_cast<float>(magnitude) * std::bit_cast<float>(kSubnormalUnit);
    return sign != 0 ? -value : value;
  }
  template <typename T>
  explicit operator T() const {
    return static_cast<T>(static_cast<float>(*this));
  }

  Bits bits() const { return bits_; }
  static SmallFloat OfBits(Bits bits) {
    SmallFloat value;
    value.bits_ = bits;
    return value;
  }

 private:
  static constexpr std::uint32_t kMagnitudeMask = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr int kSignShift = 31 - kExponentBits - kMantissaBits;
  static constexpr int kDropped = 23 - kMantissaBits;  // bits of a float's mantissa
  static constexpr std::uint32_t kBiasDifference = 127 - ((1u << (kExponentBits - 1)) - 1);
  static constexpr std::uint32_t kLargestExponent = ((1u << kExponentBits) - 1) << kMantissaBits;
  static constexpr std::uint32_t kFirstNotANumber = kInfinity ? kLargestExponent + 1 : kMagnitudeMask;
  static constexpr std::uint32_t kSmallestNormal = 1u << kMantissaBits;
  // Bits of the floats: the smallest normal number here; the distance of two subnormal ones.
  static constexpr std::uint32_t kSmallestNormalFloat = (kBiasDifference + 1) << 23;
  static constexpr std::uint32_t kSubnormalUnit =
      kBiasDifference + 1 > static_cast<std::uint32_t>(kMantissaBits)
          ? (kBiasDifference + 1 - kMantissaBits) << 23
          : 1u << kDropped;  // exponents as wide as a float's: subnormal there, too

  static Bits FromFloat(float value) {
    const auto all = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = all & 0x7FFFFFFFu;
    const auto sign = static_cast<std::uint32_t>((all & 0x80000000u) >> kSignShift);
    std::uint32_t result = 0;
    if (magnitude > 0x7F800000u) {
      result = kInfinity ? kLargestExponent | (1u << (kMantissaBits - 1)) : kMagnitudeMask;
    } else if (magnitude >= kSmallestNormalFloat || kBiasDifference == 0) {
      const std::uint32_t odd = (magnitude >> kDropped) & 1u;
      result =
          ((magnitude + odd + (1u << (kDropped - 1)) - 1) >> kDropped) - (kBiasDifference << kMantissaBits);
      const std::uint32_t overflow = kInfinity ? kLargestExponent : kMagnitudeMask;
      if (result > overflow) result = overflow;
    } else {
      // Adding 2^23 units leaves the number of units, rounded to nearest even, in the lowest bits.
      const float shift = std::bit_cast<float>(kSubnormalUnit + (23u << 23));
      result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + shift) -
               std::bit_cast<std::uint32_t>(shift);
    }
    return static_cast<Bits>(sign | result);
  }

  Bits bits_ = 0;
};

using BFloat16 = SmallFloat<std::uint16_t, 8, 7, true>;
using Float16 = SmallFloat<std::uint16_t, 5, 10, true>;
using Float8E4M3FN = SmallFloat<std::uint8_t, 4, 3, false>;
using Float8E5M2 = SmallFloat<std::uint8_t, 5, 2, true>;

}  // namespace shardplan::executor
