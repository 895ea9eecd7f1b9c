// SPDX-License-Identifier: Apache-2.0
// State that the parts of the runtime share: devices, handles, errors.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "device/runtime/engine.h"

namespace shardplan::softdevice {

// The event behind a cudaEvent_t. An event that was never recorded counts as reached.
struct Event {
  std::mutex mutex;
  Point point;
  std::shared_ptr<double> reached_ms;  // when the work was done; of the latest record
  bool timing = true;
  std::atomic<unsigned long long> capture = 0;  // of the stream that it was recorded on
  int device = 0;              // that was current when it was made; it is recorded on streams of no other
  std::atomic<int> asked = 0;  // how often torch was told that it is not over
  std::atomic<std::int64_t> recording = -1;  // the number of its latest record in a recording; -1: none
};

int CurrentDevice();
// Null: no such handle. 0 and the legacy handles: the current device's default stream.
std::shared_ptr<Stream> StreamOf(cudaStream_t handle);
std::shared_ptr<Stream> StreamOfDevice(cudaStream_t handle, int device);
Event* EventOf(cudaEvent_t handle);
// The host has waited for all that the device has, also for streams on which all was over.
void AwaitDevice(int device);

// Remembers the error for cudaGetLastError, and returns it. A broken device answers everything with its own.
cudaError_t Answer(cudaError_t error);
// cudaErrorLaunchFailure once a task failed.
cudaError_t DeviceState();
// The next cudaGetErrorString of this code in any thread says this, too.
void Explain(cudaError_t error, const std::string& what);

// Host work on a stream, in order.
Point EnqueueOn(const std::shared_ptr<Stream>& stream, std::string name, std::function<void()> work);
// The same for what moves or computes data: work without content where nothing computes.
Point EnqueueData(const std::shared_ptr<Stream>& stream, std::string name, std::function<void()> work);

// The driver's function of a name, the second version of it where there are two; null: it is not there.
void* DriverFunction(const char* name);

// Loads the kernels once torch's own are there; see [Note: when kernels are registered].
void LoadKernels();

}  // namespace shardplan::softdevice
