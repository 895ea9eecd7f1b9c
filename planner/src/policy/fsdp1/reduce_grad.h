// SPDX-License-Identifier: Apache-2.0
// The reduction of an unsharded gradient, and what becomes of the sharded one (_runtime_utils.py;
// torch/distributed/algorithms/_comm_hooks/default_hooks.py).
#pragma once

#include "policy/fsdp1/flat_param_handle.h"

namespace shardplan::fsdp1 {

// _post_backward_hook on the post-backward stream: casts, pads, reduces and accumulates the gradient, and
// drops the unsharded one. `engine_holds`: that is the tensor that the engine called the hook for, so it
// lives until the hook has returned.
void ReduceGrad(FlatParamHandle& handle, bool engine_holds);

}  // namespace shardplan::fsdp1
