// SPDX-License-Identifier: Apache-2.0
// Operators on the meta device, whose tensors have shapes and no memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace shardplan::executor {

// CallBelow for tensors of any device.
void CallOnAnyDevice(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace shardplan::executor
