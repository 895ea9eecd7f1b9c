// SPDX-License-Identifier: Apache-2.0
// Functions of the preloaded library that the kernels' plug-in calls.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace shardplan::softdevice {

#define SHARDPLAN_DEVICE_API __attribute__((visibility("default")))

// `work` runs in the stream's order.
SHARDPLAN_DEVICE_API void EnqueueKernel(cudaStream_t stream, const std::string& name,
                                        std::function<void()> work);
// Blocks until all that was issued on the stream is done. False: the device is broken.
SHARDPLAN_DEVICE_API bool FinishStream(cudaStream_t stream);
// The reason why the device is broken; empty: it is not.
SHARDPLAN_DEVICE_API std::string WhatIsBroken();
// Is this null mode?
SHARDPLAN_DEVICE_API bool ComputesNothing();
// Null mode: a number that this thread reads from a device from now on is 0 (true), or what its memory holds.
SHARDPLAN_DEVICE_API void ReadZeros(bool zeros);
// Does memory that is handed out get the poison?
SHARDPLAN_DEVICE_API bool PoisonsMemory();
SHARDPLAN_DEVICE_API void PoisonMemory(void* pointer, std::size_t bytes);

}  // namespace shardplan::softdevice
