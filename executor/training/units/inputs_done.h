// SPDX-License-Identifier: Apache-2.0
// "The gradients of these tensors are done": torch.autograd.graph.register_multi_grad_hook for C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace shardplan::executor {

// Calls `done` once in each backward that reaches any of `tensors` (all need a gradient), when the gradients
// of all those of them that it reaches are there. Never, when there are none. Hooks that were registered on
// the same tensors before are called before.
void WhenGradientsDone(const std::vector<at::Tensor>& tensors, std::function<void()> done);

}  // namespace shardplan::executor
