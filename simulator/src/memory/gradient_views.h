// SPDX-License-Identifier: Apache-2.0
// Temporaries of FSDP1 for a moment in which a micro-batch without synchronisation leaves its gradient
// unsharded.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// FlatParamHandle._use_unsharded_grad_views: a parameter without a gradient gets an empty one of its own
// piece's shape and dtype, whose data is exchanged at once for its view of the flat gradient. That needs no
// memory where the view fits as it is (a vector that is whole in the shard, of the gradient's dtype) or where
// the rank has nothing of the parameter. In the order of taking. `sharded`: the unit's shard; `gradient`: its
// flat gradient.
std::vector<Bytes> GradientViewTemporaries(const Unit& unit, const Buffer& sharded, const Buffer& gradient);

}  // namespace shardplan::internal
