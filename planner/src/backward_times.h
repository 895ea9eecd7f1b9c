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

#include "partition.h"

namespace shardplan {

// A point of the forwards that a backward covers: `position` is an index into the events of the `forward`-th.
struct ForwardTime {
  std::int32_t forward = 0;
  std::int32_t position = 0;
  auto operator<=>(const ForwardTime&) const = default;
};

// Of every event of a backward: a point after which, and at or before the next event of the forward, the node
// was made that the event belongs to. {-1, -1} for events that say nothing of it (no node, or an unknown
// one).
std::vector<ForwardTime> BackwardTimes(const Trace& trace, const ModelIndex& index, std::int32_t backward);

// Before event `position` of the backward, all that the forward computed after the `occurrence`-th
// pre-forward of `unit` has run backward.
struct ForwardUndone {
  std::int32_t position = 0;
  UnitId unit = -1;
  std::int32_t occurrence = 0;
  std::int32_t forward = 0;
};
// For every call of a unit behind which the backward computes something, in the order of the backward.
std::vector<ForwardUndone> FindForwardsUndone(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, std::int32_t backward);

}  // namespace shardplan
