// SPDX-License-Identifier: Apache-2.0
#include "memory/gradient_views.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace shardplan::internal {

std::vector<Bytes> GradientViewTemporaries(const Unit& unit, const Buffer& sharded, const Buffer& gradient) {
  if (unit.layout != LayoutKind::kFlat || sharded.memory != MemoryKind::kDevice) return {};
  const std::int64_t end = SizeBytes(sharded).value / SizeBytes(sharded.dtype);
  std::vector<Bytes> taken;
  for (const UnitParameter& parameter : unit.parameters) {
    const std::int64_t numel =
        std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1}, std::multiplies<>());
    const std::int64_t piece = std::min(numel, end - parameter.flat_offset);
    const bool fits = parameter.shape.size() == 1 && piece == numel && sharded.dtype == gradient.dtype;
    if (piece > 0 && !fits) taken.push_back({piece * SizeBytes(sharded.dtype)});
  }
  return taken;
}

}  // namespace shardplan::internal
