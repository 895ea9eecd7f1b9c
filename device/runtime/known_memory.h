// SPDX-License-Identifier: Apache-2.0
// Null mode: device memory whose floats are real, because they were computed from integers. Bulk of floats is
// nowhere. The kernels' plug-in and NCCL ask and tell; what is freed is forgotten.
#pragma once

#include <cstddef>

#include "device/runtime/software_device.h"

namespace shardplan::softdevice {

SHARDPLAN_DEVICE_API void RememberMemory(const void* begin, std::size_t bytes);
// Are all the bytes in ranges that are remembered?
SHARDPLAN_DEVICE_API bool IsRemembered(const void* begin, std::size_t bytes);
// All ranges that begin in these bytes, which are freed. Many bytes are given back to the host, and read as
// zeros again: what a step computes of integers would else stay in the host's memory, block after block.
SHARDPLAN_DEVICE_API void ForgetMemory(const void* begin, std::size_t bytes);

}  // namespace shardplan::softdevice
