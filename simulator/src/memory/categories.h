// SPDX-License-Identifier: Apache-2.0
// Categories of memory as indices: buffer roles, storage roles, and two of kernels.
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

inline constexpr std::int32_t kBufferRoles = static_cast<std::int32_t>(shardplan::kBufferRoles);
inline constexpr std::int32_t kStorageRoles = static_cast<std::int32_t>(StorageRole::kParameterGrad) + 1;
inline constexpr std::int32_t kKernelTemp = kBufferRoles + kStorageRoles;
inline constexpr std::int32_t kCublasWorkspace = kKernelTemp + 1;

constexpr std::int32_t CategoryOf(BufferRole role) { return static_cast<std::int32_t>(role); }
constexpr std::int32_t CategoryOf(StorageRole role) {
  if (role == StorageRole::kParameterGrad) return CategoryOf(BufferRole::kGradUnsharded);
  if (role == StorageRole::kOptimizerTemp) return CategoryOf(BufferRole::kOptimizerTemp);
  return kBufferRoles + static_cast<std::int32_t>(role);
}

}  // namespace shardplan::internal
