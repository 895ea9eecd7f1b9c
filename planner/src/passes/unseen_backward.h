// SPDX-License-Identifier: Apache-2.0
// Units whose backward PyTorch's FSDP does not see begin.
#pragma once

#include <optional>

#include "shardplan/schemas/error.h"
#include "units/partition.h"

namespace shardplan {

struct UnseenBackward {
  UnitId unit = -1;
  ParameterId parameter = -1;  // the first that gets a gradient
  bool is_called = true;       // a forward that the backward covers calls the unit's module
  bool is_second = false;      // an earlier backward ran through the unit in the same forward
};

// The first unit whose parameters get gradients in a backward although no gradient of an output of it has
// come before. Its outputs are in a container that pytree does not look into, torch.utils.checkpoint with
// use_reentrant=True ran it without gradients, a module inside of it was called by itself, or its forward is
// run backward again: there is no pre_backward at which it could be gathered.
std::optional<UnseenBackward> FindUnseenBackward(const Trace& trace, const ModelIndex& index,
                                                 const Partition& partition);

// kBadInput, with the ways out.
Error ErrorOf(const UnseenBackward& unseen, const Trace& trace, const Partition& partition);

}  // namespace shardplan
