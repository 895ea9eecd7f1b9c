// SPDX-License-Identifier: Apache-2.0
// Units whose backward PyTorch's FSDP does not see begin.
#pragma once

#include <optional>

#include "shardplan/schemas/error.h"
#include "units/partition.h"

namespace shardplan {

// The first unit whose parameters get gradients in a backward although no gradient of an output of it has
// come before. Its outputs are in a container that pytree does not look into, or torch.utils.checkpoint with
// use_reentrant=True ran it without gradients: there is no pre_backward at which it could be gathered.
std::optional<UnitId> UnitWithUnseenBackward(const Trace& trace, const ModelIndex& index,
                                             const Partition& partition);

// kBadInput, with the ways out.
Error UnseenBackward(const Partition& partition, UnitId unit);

}  // namespace shardplan
