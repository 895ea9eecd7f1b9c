// SPDX-License-Identifier: Apache-2.0
// A kernel of the device: the host's kernel of the same operator, on the same memory, in the current stream's
// order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace shardplan::softdevice {

void RunKernel(const c10::OperatorHandle& op, c10::Stack* stack);

// Queues `work` on the current stream of the device. A c10::Error of it loses its backtrace.
void Queue(c10::Device device, const std::string& name, std::function<void()> work);
// The device of the tensors in the arguments. Throws when they are on several.
c10::Device DeviceOf(const c10::OperatorHandle& op, const c10::Stack& arguments);

}  // namespace shardplan::softdevice
