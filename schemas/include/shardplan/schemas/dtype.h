// SPDX-License-Identifier: Apache-2.0
// Element types, named as torch names them ("bfloat16").
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardplan {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kComplex64,
  kComplex128,
  kComplex32,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
};

// Bytes of one element: 8 for kFloat64 ... 1 for kBool.
std::int64_t SizeBytes(DType dtype);
// torch's name without "torch.": "float32".
std::string_view Name(DType dtype);
// The reverse of Name; nullopt for an unknown name.
std::optional<DType> DTypeFromName(std::string_view name);
bool IsFloatingPoint(DType dtype);

}  // namespace shardplan
