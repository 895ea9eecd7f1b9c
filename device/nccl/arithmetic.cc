// SPDX-License-Identifier: Apache-2.0
#include "device/nccl/arithmetic.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace shardplan::softdevice {
namespace {

struct Bfloat16 {
  std::uint16_t bits = 0;
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool nan = value != value;
    bits = nan ? 0x7FC0 : static_cast<std::uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

using Half = _Float16;

template <typename T>
constexpr bool kIsSmall = std::is_same_v<T, Bfloat16> || std::is_same_v<T, Half>;
template <typename T>
constexpr bool kIsFloating = kIsSmall<T> || std::is_floating_point_v<T>;
template <typename T>
using Wide = std::conditional_t<kIsSmall<T>, float, T>;

template <typename T>
T Load(const std::byte* from, std::size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
Wide<T> Combine(ncclRedOp_t op, Wide<T> a, Wide<T> b) {
  switch (op) {
    case ncclProd:
      return static_cast<Wide<T>>(a * b);
    case ncclMax:
      return a != a || a > b ? a : b;
    case ncclMin:
      return a != a || a < b ? a : b;
    default:
      return static_cast<Wide<T>>(a + b);
  }
}

template <typename T>
void ReduceAs(const Reduction& reduction, const std::vector<const std::byte*>& from, std::size_t count,
              std::byte* to) {
  const auto ranks = static_cast<double>(from.size());
  const bool mean = reduction.op == ncclAvg;
  const bool scales = reduction.has_factor || (mean && kIsFloating<T>);
  const auto factor = static_cast<Wide<T>>(reduction.has_factor ? reduction.factor : 1.0 / ranks);
  for (std::size_t i = 0; i < count; ++i) {
    Wide<T> sum = {};
    for (std::size_t r = 0; r < from.size(); ++r) {
      auto value = static_cast<Wide<T>>(Load<T>(from[r], i));
      if (scales) value = static_cast<Wide<T>>(static_cast<T>(static_cast<Wide<T>>(value * factor)));
      sum = r == 0 ? value : Combine<T>(reduction.op, sum, value);
    }
    if (mean && !scales) sum = static_cast<Wide<T>>(sum / static_cast<Wide<T>>(ranks));
    const auto result = static_cast<T>(sum);
    std::memcpy(to + i * sizeof(T), &result, sizeof(T));
  }
}

}  // namespace

std::size_t SizeOf(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

const char* NameOf(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat16:
      return "float16";
    case ncclFloat32:
      return "float32";
    case ncclFloat64:
      return "float64";
    case ncclBfloat16:
      return "bfloat16";
    case ncclFloat8e4m3:
      return "float8_e4m3fn";
    case ncclFloat8e5m2:
      return "float8_e5m2";
    default:
      return "uint8";
  }
}

bool CanReduce(ncclDataType_t dtype) { return dtype != ncclFloat8e4m3 && dtype != ncclFloat8e5m2; }

void Reduce(const Reduction& reduction, ncclDataType_t dtype, const std::vector<const std::byte*>& from,
            std::size_t count, std::byte* to) {
  switch (dtype) {
    case ncclInt8:
      return ReduceAs<std::int8_t>(reduction, from, count, to);
    case ncclUint8:
      return ReduceAs<std::uint8_t>(reduction, from, count, to);
    case ncclInt32:
      return ReduceAs<std::int32_t>(reduction, from, count, to);
    case ncclUint32:
      return ReduceAs<std::uint32_t>(reduction, from, count, to);
    case ncclInt64:
      return ReduceAs<std::int64_t>(reduction, from, count, to);
    case ncclUint64:
      return ReduceAs<std::uint64_t>(reduction, from, count, to);
    case ncclFloat16:
      return ReduceAs<Half>(reduction, from, count, to);
    case ncclBfloat16:
      return ReduceAs<Bfloat16>(reduction, from, count, to);
    case ncclFloat32:
      return ReduceAs<float>(reduction, from, count, to);
    case ncclFloat64:
      return ReduceAs<double>(reduction, from, count, to);
    default:
      break;
  }
}

double FactorOf(const void* scalar, ncclDataType_t dtype) {
  const auto* bytes = static_cast<const std::byte*>(scalar);
  switch (dtype) {
    case ncclFloat16:
      return static_cast<double>(Load<Half>(bytes, 0));
    case ncclBfloat16:
      return static_cast<float>(Load<Bfloat16>(bytes, 0));
    case ncclFloat32:
      return Load<float>(bytes, 0);
    case ncclFloat64:
      return Load<double>(bytes, 0);
    case ncclInt32:
      return Load<std::int32_t>(bytes, 0);
    case ncclInt64:
      return static_cast<double>(Load<std::int64_t>(bytes, 0));
    default:
      return std::to_integer<int>(bytes[0]);
  }
}

}  // namespace shardplan::softdevice
