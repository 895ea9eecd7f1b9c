// SPDX-License-Identifier: Apache-2.0
// Null mode: which numbers are real. Beside those of a kind and size it is device memory whose floats were
// computed from integers. The kernels' plug-in and NCCL ask and tell; what is freed is forgotten.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/runtime/software_device.h"

namespace shardplan::softdevice {

// Elements of a tensor, or of all that a collective gives or takes, whose numbers are real: integers and
// truth values; integers of one byte, which bulk has, too; floats.
constexpr std::int64_t kKnownIntegers = std::int64_t{1} << 24;
constexpr std::int64_t kKnownBytes = std::int64_t{1} << 22;
constexpr std::int64_t kKnownFloats = 1024;

SHARDPLAN_DEVICE_API void RememberMemory(const void* begin, std::size_t bytes);
// Are all the bytes in ranges that are remembered?
SHARDPLAN_DEVICE_API bool IsRemembered(const void* begin, std::size_t bytes);
// All ranges that begin in these bytes, which are freed. Many bytes are given back to the host, and read as
// zeros again: what a step computes of integers would else stay in the host's memory, block after block.
SHARDPLAN_DEVICE_API void ForgetMemory(const void* begin, std::size_t bytes);

}  // namespace shardplan::softdevice
