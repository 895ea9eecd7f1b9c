// SPDX-License-Identifier: Apache-2.0
#include "passes/unseen_backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace shardplan {
namespace {

bool Calls(const Pass& forward, const ModelIndex& index, const Partition& partition, UnitId unit) {
  return std::ranges::any_of(forward.events, [&](const TraceEvent& event) {
    const auto* enter = std::get_if<EnterEvent>(&event);
    if (enter == nullptr) return false;
    const UnitId of = partition.unit_of_module[index.canonical[enter->module]];
    return of >= 0 && FirstGroupOf(partition, of) == unit;
  });
}

}  // namespace

std::optional<UnseenBackward> FindUnseenBackward(const Trace& trace, const ModelIndex& index,
                                                 const Partition& partition) {
  std::optional<UnseenBackward> first;
  std::set<std::pair<std::int32_t, UnitId>> undone;  // forwards, and units that a backward ran through
  for (const Pass& backward : trace.backwards) {
    std::vector<bool> seen(partition.units.size());
    const auto is_second = [&](UnitId unit) {
      return std::ranges::any_of(backward.forwards, [&](std::int32_t forward) {
        return undone.contains({forward, unit});
      });
    };
    for (const TraceEvent& event : backward.events) {
      if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
        const UnitId unit = partition.unit_of_module[index.canonical[ready->module]];
        if (unit >= 0) seen[unit] = true;
      } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
        const UnitId unit = OwnerOf(partition, grad->parameter, -1).unit;
        if (unit < 0 || seen[FirstGroupOf(partition, unit)]) continue;
        const bool is_called = std::ranges::any_of(backward.forwards, [&](std::int32_t forward) {
          return Calls(trace.forwards[forward], index, partition, FirstGroupOf(partition, unit));
        });
        const UnseenBackward unseen = {.unit = unit,
                                       .parameter = grad->parameter,
                                       .is_called = is_called,
                                       .is_second = is_second(FirstGroupOf(partition, unit))};
        if (unseen.is_second) return unseen;  // the likelier cause where the root is kept
        if (!first) first = unseen;
      }
    }
    for (const std::int32_t forward : backward.forwards) {
      for (UnitId unit = 0; unit < std::ssize(partition.units); ++unit) {
        if (seen[unit]) undone.insert({forward, unit});
      }
    }
  }
  return first;
}

Error ErrorOf(const UnseenBackward& unseen, const Trace& trace, const Partition& partition) {
  const std::string& fqn = partition.units[unseen.unit].unit.fqn;
  const std::string_view ways_out =
      unseen.is_second ? "its forward is run backward a second time, and FSDP has freed its parameters "
                         "behind the first. Add "
                         "the losses, and go backward once"
      : unseen.is_called
          ? "no output of it that PyTorch's FSDP finds does. FSDP does not look into dataclasses and classes "
            "that torch.utils._pytree does not know, and torch.utils.checkpoint with use_reentrant=True "
            "around "
            "the unit runs it without gradients. Return tensors, tuples, lists or dicts, or register the "
            "class "
            "with pytree; checkpoint with use_reentrant=False, or inside the unit; or keep the unit gathered "
            "(reshard_after_forward false)"
          : "the forward that was run backward does not call the unit's module: a module inside of it was "
            "called by itself, as a loss calls a head. Make that module a unit of its own (--unit, or "
            "`units`)";
  return {.code = ErrorCode::kBadInput,
          .message =
              fmt::format("unit {}: its backward is not seen to begin, so nothing can gather it: {} gets a "
                          "gradient, but {}",
                          fqn.empty() ? "(root)" : fqn, trace.parameters[unseen.parameter].fqn, ways_out),
          .pointer = "/units"};
}

}  // namespace shardplan
