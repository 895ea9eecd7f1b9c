// SPDX-License-Identifier: Apache-2.0
// The autograd node whose backward marks "the gradients of the unit's inputs are done".
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

class Runtime;

// Replaces `tensors[i]` for every i in `indices` (all need a gradient) by the output of one identity node
// over all of them. The module must not modify a view output in place, as with any custom function. The node
// calls runtime->PostBackward(unit) when the gradients of all its outputs have arrived.
void InsertPostBackward(const std::shared_ptr<Runtime>& runtime, UnitId unit,
                        std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& indices);

}  // namespace shardplan::executor
