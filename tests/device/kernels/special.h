// Kernels that are not the host's of the same name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardplan::softdevice {

void Copy(const c10::OperatorHandle& op, c10::Stack* stack);
void ForeachCopy(const c10::OperatorHandle& op, c10::Stack* stack);
void NativeDropout(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace shardplan::softdevice
