// What torch.optim allocates while a step runs.
#pragma once

#include <vector>

#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// Requested sizes of AdamW's temporaries (torch/optim/adam.py, not capturable, no amsgrad) that are alive at
// the same time, for the shards of the parameters in the optimizer's order. Foreach: a list of square roots
// of all. Loop: the square root and its quotient of one parameter, while the variable still names the
// quotient of the one before; where that is most. Fused: none.
std::vector<Bytes> AdamWTemporaries(OptimizerImplementation implementation, const std::vector<Bytes>& shards);

}  // namespace shardplan
