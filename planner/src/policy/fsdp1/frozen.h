// SPDX-License-Identifier: Apache-2.0
// FSDP1 with use_orig_params: what a flat parameter with trainable and frozen parts does to the backward.
#pragma once

#include <optional>

#include "units/partition.h"

namespace shardplan {

// A flat parameter with one trainable part requires a gradient as a whole, and so does all that is computed
// from its frozen parts: the backward runs through modules that it would not reach in the plain model. The
// trace with the outputs of units that get a gradient because of that (events of hooks; the added arithmetic
// is not in it). nullopt: no unit has such a flat parameter.
std::optional<Trace> WithGradientsOfFrozenParts(const Trace& trace, const ModelIndex& index,
                                                const Partition& partition);

}  // namespace shardplan
