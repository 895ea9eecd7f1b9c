// SPDX-License-Identifier: Apache-2.0
// A kernel of the device: the host's kernel of the same operator, on the same memory, in the current stream's
// order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <optional>
#include <string>

namespace shardplan::softdevice {

void RunKernel(const c10::OperatorHandle& op, c10::Stack* stack);

// The same, computed before it returns; the stream's earlier work is done first.
c10::Stack RunAtOnce(const c10::OperatorHandle& op, c10::Stack arguments);
// Computes on the memory of the arguments, and writes what is new to `results`, which have its shapes. Throws
// where the host has no such kernel.
void ComputeInto(const c10::OperatorHandle& op, c10::Stack arguments, const c10::Stack& results);
// New values as meta tensors, after tensors that are written have got their new shapes. Nothing: only the
// kernel itself tells.
std::optional<c10::Stack> ShapesOf(const c10::OperatorHandle& op, c10::Stack arguments);
bool IsWritten(const c10::Argument& argument);
// Does the shape of a result, or the result itself, depend on numbers that the host reads?
bool ReadsNumbers(const c10::OperatorHandle& op);

// Queues `work` on the current stream of the device. A c10::Error of it loses its backtrace.
void Queue(c10::Device device, const std::string& name, std::function<void()> work);
// The device of the tensors in the arguments. Throws when they are on several.
c10::Device DeviceOf(const c10::OperatorHandle& op, const c10::Stack& arguments);

}  // namespace shardplan::softdevice
