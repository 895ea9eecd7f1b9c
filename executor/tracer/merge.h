// SPDX-License-Identifier: Apache-2.0
// Recordings of one step, put together: what a second recording in which something is otherwise says about
// the first. The rules of the tracer (tools/python/shardplan/tracer/placement.py, releases.py, frozen.py).
#pragma once

#include <optional>
#include <vector>

#include "shardplan/schemas/trace.h"

namespace shardplan::executor {

// [Note: two recordings]
// A mark on a module's inputs adds up what the module's own uses of an input send back, before the caller's
// other uses join. Without it the engine adds all of them up as they come. An input that is used several
// times inside a module and again outside has a different sum that way, and sometimes one temporary more. The
// unsharded step has no marks (and FSDP has them on its units only), so then a second recording without them
// gives operators and storages, and the first only the moments. The events of a backward recorded without
// marks, with the inputs_done events of the one with them. Nothing: the two do not run alike.
std::optional<std::vector<TraceEvent>> WithInputsDone(const std::vector<TraceEvent>& plain,
                                                      const std::vector<TraceEvent>& marked);

// Puts `release` events into `forwards` where storages die in `unkept`, the same forwards with nothing kept
// for a backward. Nothing is marked where the two do not run alike.
void MarkReleases(std::vector<Pass>& forwards, const std::vector<Pass>& unkept);

// Tensor::may_require_grad and in_loss from a recording in which every parameter trains.
void MarkTrainable(std::vector<Pass>& forwards, const std::vector<Pass>& trained_forwards,
                   const std::vector<Pass>& trained_backwards);

}  // namespace shardplan::executor
