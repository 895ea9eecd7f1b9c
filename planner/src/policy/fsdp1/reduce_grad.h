// The reduction of an unsharded gradient, and what becomes of the sharded one (_runtime_utils.py;
// torch/distributed/algorithms/_comm_hooks/default_hooks.py).
#pragma once

#include "policy/fsdp1/flat_param_handle.h"

namespace shardplan::fsdp1 {

// _post_backward_hook on the post-backward stream: casts, pads, reduces and accumulates the gradient, and
// drops the unsharded one.
void ReduceGrad(FlatParamHandle& handle);

}  // namespace shardplan::fsdp1
