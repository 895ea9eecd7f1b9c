// SPDX-License-Identifier: Apache-2.0
// Operators that read a parameter outside of the unit that it belongs to.
#pragma once

#include <optional>

#include "shardplan/schemas/error.h"
#include "units/partition.h"

namespace shardplan {

// kBadInput at the first operator of a forward or backward that reads a parameter of a unit around which its
// module is not: the unit is gathered for its own modules, so PyTorch reads a shard there. None: there is
// none, or the trace does not say of which module they are.
std::optional<Error> ReadOutsideItsUnit(const Trace& trace, const ModelIndex& index,
                                        const Partition& partition);

}  // namespace shardplan
