// SPDX-License-Identifier: Apache-2.0
#include "replay/host_kernels.h"

#include <cstring>
#include <type_traits>

#include "replay/small_floats.h"

namespace shardplan::executor {
namespace {

// Calls visit(T{}) with the element type.
template <typename Visit>
void WithType(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat64:
      return visit(double{});
    case DType::kFloat32:
      return visit(float{});
    case DType::kBFloat16:
      return visit(BFloat16{});
    case DType::kFloat16:
      return visit(Float16{});
    case DType::kFloat8E4M3FN:
      return visit(Float8E4M3FN{});
    case DType::kFloat8E5M2:
      return visit(Float8E5M2{});
    case DType::kInt64:
      return visit(std::int64_t{});
    case DType::kInt32:
      return visit(std::int32_t{});
    case DType::kInt16:
      return visit(std::int16_t{});
    case DType::kInt8:
      return visit(std::int8_t{});
    default:
      return visit(std::uint8_t{});
  }
}

template <typename To, typename From>
To Convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(value);
  }
}

// The type that arithmetic on T is done in.
template <typename T>
using Wide = std::conditional_t<std::is_class_v<T>, float, T>;

template <typename From, typename To, typename Combine>
void ForEachRun(const CopySpec& copy, PartPointers src, PartPointers dst, Combine&& combine) {
  for (const CopyRun& run : copy.runs) {
    const From* from = reinterpret_cast<const From*>(src[run.src_part]) + run.src_offset;
    To* to = reinterpret_cast<To*>(dst[run.dst_part]) + run.dst_offset;
    for (std::int64_t row = 0; row < run.rows; ++row) {
      combine(from + row * run.src_stride, to + row * run.dst_stride, run.row_numel);
    }
  }
}

// Same dtype: bytes.
void CopyBytes(const CopySpec& copy, PartPointers src, PartPointers dst) {
  const std::int64_t size = SizeBytes(copy.src_dtype);
  for (const CopyRun& run : copy.runs) {
    const std::byte* from = src[run.src_part] + run.src_offset * size;
    std::byte* to = dst[run.dst_part] + run.dst_offset * size;
    const bool one_piece = run.src_stride == run.row_numel && run.dst_stride == run.row_numel;
    if (one_piece) {
      std::memcpy(to, from, static_cast<std::size_t>(run.rows * run.row_numel * size));
      continue;
    }
    for (std::int64_t row = 0; row < run.rows; ++row) {
      std::memcpy(to + row * run.dst_stride * size, from + row * run.src_stride * size,
                  static_cast<std::size_t>(run.row_numel * size));
    }
  }
}

}  // namespace

void CopyOnHost(const CopySpec& copy, PartPointers src, PartPointers dst) {
  if (copy.src_dtype == copy.dst_dtype) {
    CopyBytes(copy, src, dst);
  } else {
    WithType(copy.src_dtype, [&](auto from_type) {
      WithType(copy.dst_dtype, [&](auto to_type) {
        using From = decltype(from_type);
        using To = decltype(to_type);
        ForEachRun<From, To>(copy, src, dst, [](const From* from, To* to, std::int64_t n) {
          for (std::int64_t i = 0; i < n; ++i) to[i] = Convert<To>(from[i]);
        });
      });
    });
  }
  for (const ZeroRun& zero : copy.zeros) {
    const std::int64_t size = SizeBytes(copy.dst_dtype);
    std::memset(dst[zero.part] + zero.offset * size, 0, static_cast<std::size_t>(zero.numel * size));
  }
}

void AccumulateOnHost(const CopySpec& copy, PartPointers src, PartPointers dst) {
  WithType(copy.src_dtype, [&](auto from_type) {
    WithType(copy.dst_dtype, [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      ForEachRun<From, To>(copy, src, dst, [](const From* from, To* to, std::int64_t n) {
        using W = Wide<To>;
        for (std::int64_t i = 0; i < n; ++i) {
          to[i] = Convert<To>(static_cast<W>(Convert<W>(to[i]) + Convert<W>(from[i])));
        }
      });
    });
  });
}

void DivideOnHost(std::byte* data, std::int64_t numel, DType dtype, double divisor) {
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    T* values = reinterpret_cast<T*>(data);
    const W by = static_cast<W>(divisor);
    for (std::int64_t i = 0; i < numel; ++i)
      values[i] = Convert<T>(static_cast<W>(Convert<W>(values[i]) / by));
  });
}

void ReduceOnHost(const std::byte* src, std::int64_t inputs, std::int64_t stride, std::byte* dst,
                  std::int64_t numel, DType dtype, double divisor) {
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const T* from = reinterpret_cast<const T*>(src);
    T* to = reinterpret_cast<T*>(dst);
    for (std::int64_t i = 0; i < numel; ++i) {
      double sum = 0;
      for (std::int64_t m = 0; m < inputs; ++m) sum += static_cast<double>(from[m * stride + i]);
      to[i] = static_cast<T>(sum / divisor);
    }
  });
}

void PoisonOnHost(std::byte* data, std::int64_t bytes) {
  // All bits set: NaN in every floating-point type, -1 in integers.
  std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
}

double LoadElement(const std::byte* data, DType dtype, std::int64_t index) {
  double value = 0;
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    value = static_cast<double>(reinterpret_cast<const T*>(data)[index]);
  });
  return value;
}

void StoreElement(std::byte* data, DType dtype, std::int64_t index, double value) {
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    reinterpret_cast<T*>(data)[index] = static_cast<T>(value);
  });
}

}  // namespace shardplan::executor
