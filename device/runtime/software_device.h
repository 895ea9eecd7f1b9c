// SPDX-License-Identifier: Apache-2.0
// Functions of the preloaded library that the kernels' plug-in calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// A task of this name is no kernel of the program.
constexpr std::string_view kPoisonTask = "poison";

// Recordings (recorder.h). Without one these do nothing.

// Memory as an operator sees it. strides: in elements; empty: contiguous.
struct RecordedTensor {
  std::uintptr_t address = 0;
  std::string_view dtype;  // as torch names it; lives for ever
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// A node of autograd's graph: its operator's forward ran in the thread under the number.
struct AutogradNode {
  std::uint64_t thread = 0;
  std::uint64_t number = 0;
  std::string name;
};

SHARDPLAN_DEVICE_API bool IsRecording();
// This thread begins an operator: what it launches until the end is the operator's. `makes`: the node that
// the operator's backward will be.
SHARDPLAN_DEVICE_API void BeginOperator(const std::optional<AutogradNode>& makes);
// `stream`: where the operator ran although it launched nothing; null: nothing was run then.
SHARDPLAN_DEVICE_API void EndOperator(std::string_view name, std::span<const RecordedTensor> reads,
                                      std::span<const RecordedTensor> writes, const cudaStream_t* stream);
// It raised.
SHARDPLAN_DEVICE_API void AbandonOperator();
// The same of an operator that launches kernels of its own beside operators that it calls: these have their
// own accesses, and are not its.
SHARDPLAN_DEVICE_API void BeginOuterOperator();
// raised: nothing is recorded.
SHARDPLAN_DEVICE_API void EndOuterOperator(std::string_view name, std::span<const RecordedTensor> reads,
                                           std::span<const RecordedTensor> writes, bool raised);
// Memory of the host that devices read and write, and an operator of the host that touches it.
SHARDPLAN_DEVICE_API bool IsPinned(const void* pointer);
SHARDPLAN_DEVICE_API void RecordHostOperator(std::string_view name, std::span<const RecordedTensor> reads,
                                             std::span<const RecordedTensor> writes);
SHARDPLAN_DEVICE_API void RecordAllocated(std::uintptr_t address, std::size_t bytes, cudaStream_t stream,
                                          int device);
SHARDPLAN_DEVICE_API void RecordFreed(std::uintptr_t address, std::size_t bytes);
// The allocator has the block again, which it was given back by this thread or another one.
SHARDPLAN_DEVICE_API void RecordFreeCompleted();
// Between the calls c10's guard records an event.
SHARDPLAN_DEVICE_API void GuardRecords(bool now);
SHARDPLAN_DEVICE_API void RecordUsedOn(std::uintptr_t address, cudaStream_t stream);
// The plug-in says which node's backward this thread runs, and is told when a recording begins.
struct AutogradWatch {
  std::function<std::optional<AutogradNode>()> node_here;
  std::function<void()> begins;
};
SHARDPLAN_DEVICE_API void WatchAutograd(AutogradWatch watch);

}  // namespace shardplan::softdevice
