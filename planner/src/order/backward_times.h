// SPDX-License-Identifier: Apache-2.0
// When a node of the backward was made in the forward.
//
// [Note: the engine undoes the forward in reverse]
// Autograd runs, of the nodes that are ready, the one made last. A node waits only for nodes made after it,
// so the one made last of those that have not run is always ready: nodes run strictly in the reverse of the
// order in which the forward made them (gradient accumulators excepted, which run as soon as they can).
// Whatever hangs on a node that was made at some point of the forward therefore runs when everything made
// later has.
#pragma once

#include <compare>
#include <vector>

#include "units/partition.h"

namespace shardplan {

// When in the forwards that a backward covers something was made: `forward` is the position of one of them in
// Pass::forwards. With i the index of an event of it, 4 i is the event itself, 4 i + 1 what the module that
// event i enters computes, 4 i - 1 a tensor that event i names first.
struct ForwardTime {
  std::int32_t forward = 0;
  std::int32_t quarter = 0;
  auto operator<=>(const ForwardTime&) const = default;
};

// By event of a backward: when the node was made that it belongs to. {-1, -1} for events that say nothing of
// it (no node, or an unknown one).
std::vector<ForwardTime> BackwardTimes(const Trace& trace, const ModelIndex& index, std::int32_t backward);

// An event before event `position` of a backward, for the `occurrence`-th call of `unit` in the forward at
// position `forward`. Either all that was computed since its pre-forward has run backward. Or the gradients
// of its inputs are done, and the hooks on them of the modules that had returned them before have run (frozen
// units only, whose reshard hangs on that).
struct AutogradEvent {
  std::int32_t position = 0;
  UnitId unit = -1;
  std::int32_t occurrence = 0;
  std::int32_t forward = 0;
  bool inputs_done = false;
};
// In the order of the backward.
std::vector<AutogradEvent> FindAutogradEvents(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, std::int32_t backward);

}  // namespace shardplan
