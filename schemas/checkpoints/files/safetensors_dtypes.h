// SPDX-License-Identifier: Apache-2.0
// The names that safetensors has for dtypes.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardplan/schemas/dtype.h"

namespace shardplan {

inline constexpr auto kSafetensorsDTypes = std::to_array<std::pair<std::string_view, DType>>({
    {"F64", DType::kFloat64},
    {"F32", DType::kFloat32},
    {"BF16", DType::kBFloat16},
    {"F16", DType::kFloat16},
    {"F8_E4M3", DType::kFloat8E4M3FN},
    {"F8_E5M2", DType::kFloat8E5M2},
    {"I64", DType::kInt64},
    {"I32", DType::kInt32},
    {"I16", DType::kInt16},
    {"I8", DType::kInt8},
    {"U8", DType::kUInt8},
    {"BOOL", DType::kBool},
    {"C64", DType::kComplex64},
    {"U16", DType::kUInt16},
    {"U32", DType::kUInt32},
    {"U64", DType::kUInt64},
    {"F8_E4M3FNUZ", DType::kFloat8E4M3FNUZ},
    {"F8_E5M2FNUZ", DType::kFloat8E5M2FNUZ},
    {"F8_E8M0", DType::kFloat8E8M0FNU},
});

inline std::optional<DType> SafetensorsDType(std::string_view name) {
  for (const auto& [known, dtype] : kSafetensorsDTypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}
// Empty: it has none.
inline std::string_view SafetensorsName(DType dtype) {
  for (const auto& [name, known] : kSafetensorsDTypes) {
    if (known == dtype) return name;
  }
  return {};
}
inline std::string SafetensorsDTypes() {
  std::string names;
  for (const auto& [name, dtype] : kSafetensorsDTypes)
    names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

}  // namespace shardplan
