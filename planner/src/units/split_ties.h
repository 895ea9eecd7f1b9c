// SPDX-License-Identifier: Apache-2.0
// Pass `split_ties`: a parameter that modules of several units share is one in each of them.
#pragma once

#include <optional>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"
#include "units/partition.h"

namespace shardplan {

// [Note: a tie that units break]
// Each unit replaces the parameters of its own modules by shards of its own, so what two units share is
// gathered by both, and each gets the gradient that its own modules make. The trace is of the plain model,
// where the autograd engine adds these gradients up: the sums between units go, and each unit's gradient is
// there as soon as its last part is. Modules of no unit go on with what the model was made with, a parameter
// of no unit. Traces without operators: before the last of the unit's modules that
// name the parameter is done with its inputs, else at the end.
//
// Since 2.15 PyTorch refuses two such units under one root (shared_parameters_are_refused):
// CheckTiesWithinRoots.
//
// The trace with a parameter of its own for each unit, under the first of the unit's names for it, and the
// units that have these.
struct SplitTrace {
  Trace trace;
  Partition partition;
};
// nullopt: no parameter is in two units, or in one and in a module of none.
std::optional<SplitTrace> SplitTies(const Trace& trace, const ModelIndex& index, const Partition& partition);

// kBadInput: units under one root share a parameter.
Status CheckTiesWithinRoots(const Trace& trace, const ModelIndex& index, const Partition& partition);

}  // namespace shardplan
