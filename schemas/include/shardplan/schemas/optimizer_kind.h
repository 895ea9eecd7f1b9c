// SPDX-License-Identifier: Apache-2.0
// The optimizers that are known (optimizers.h has their tables).
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardplan {

enum class OptimizerKind : std::uint8_t { kNone, kSgd, kAdamW, kAdam, kAdafactor, kMuon };
inline constexpr std::size_t kOptimizerKinds = static_cast<std::size_t>(OptimizerKind::kMuon) + 1;

}  // namespace shardplan
