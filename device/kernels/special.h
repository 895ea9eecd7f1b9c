// SPDX-License-Identifier: Apache-2.0
// Kernels that are not the host's of the same name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardplan::softdevice {

// Arguments as the host's kernel takes them, where it differs from CUDA's.
void AdaptToHost(const c10::OperatorHandle& op, c10::Stack& stack);

void Copy(const c10::OperatorHandle& op, c10::Stack* stack);
void ForeachCopy(const c10::OperatorHandle& op, c10::Stack* stack);
void NativeDropout(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace shardplan::softdevice
