// SPDX-License-Identifier: Apache-2.0
#include "passes/unseen_backward.h"

#include <fmt/format.h>

#include <variant>
#include <vector>

namespace shardplan {

std::optional<UnitId> UnitWithUnseenBackward(const Trace& trace, const ModelIndex& index,
                                             const Partition& partition) {
  for (const Pass& backward : trace.backwards) {
    std::vector<bool> seen(partition.units.size());
    for (const TraceEvent& event : backward.events) {
      if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
        const UnitId unit = partition.unit_of_module[index.canonical[ready->module]];
        if (unit >= 0) seen[unit] = true;
      } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
        const UnitId unit = OwnerOf(partition, grad->parameter, -1).unit;
        if (unit >= 0 && !seen[FirstGroupOf(partition, unit)]) return unit;
      }
    }
  }
  return std::nullopt;
}

Error UnseenBackward(const Partition& partition, UnitId unit) {
  const std::string& fqn = partition.units[unit].unit.fqn;
  return {
      .code = ErrorCode::kBadInput,
      .message = fmt::format(
          "unit {}: its backward is not seen to begin, so nothing can gather it: its parameters get "
          "gradients, but no "
          "output of it that PyTorch's FSDP finds does. FSDP does not look into dataclasses and classes that "
          "torch.utils._pytree does not know, and torch.utils.checkpoint with use_reentrant=True around the "
          "unit runs "
          "it without gradients. Return tensors, tuples, lists or dicts, or register the class with pytree; "
          "checkpoint with use_reentrant=False, or inside the unit; or keep the unit gathered "
          "(reshard_after_forward false)",
          fqn.empty() ? "(root)" : fqn),
      .pointer = "/units"};
}

}  // namespace shardplan
