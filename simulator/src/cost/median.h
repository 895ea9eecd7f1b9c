// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cost/fixed_log.h"

namespace shardplan::internal {

// At least one value; the mean of both in the middle of an even number.
inline std::int64_t Median(std::vector<std::int64_t> values) {
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : MulDiv(values[half - 1] + values[half], 1, 2);
}

}  // namespace shardplan::internal
