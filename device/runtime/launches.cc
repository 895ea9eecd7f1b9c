// SPDX-License-Identifier: Apache-2.0
// cudart: kernels. None is run: a launch that reaches the runtime is an error that names the kernel, or,
// where nothing computes, work without content.
//
// [Note: a launch that slips through]
// The plug-in replaces torch's kernels above the launch. A kernel that is launched all the same was not
// replaced, and its output would be whatever the memory held: so the device breaks.
#include <cxxabi.h>

#include <cstdlib>
#include <map>

#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, const char*> names;  // by the host's stub
};
Kernels& TheKernels() {
  static auto* const kernels = new Kernels();
  return *kernels;
}

std::string NameOf(const void* function) {
  Kernels& kernels = TheKernels();
  const std::lock_guard lock(kernels.mutex);
  const auto found = kernels.names.find(function);
  if (found == kernels.names.end()) return "an unknown kernel";
  int status = 0;
  char* readable = abi::__cxa_demangle(found->second, nullptr, nullptr, &status);
  const std::string name = status == 0 ? readable : found->second;
  std::free(readable);
  return name;
}

cudaError_t Refuse(const void* function) {
  Explain(cudaErrorInvalidDeviceFunction, "no kernel of the plug-in stands for " + NameOf(function));
  return Answer(cudaErrorInvalidDeviceFunction);
}

cudaError_t Launch(const void* function, cudaStream_t stream) {
  if (!TheSettings().null) return Refuse(function);
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  NoteLaunch(*on, Recorder::Get() == nullptr ? "" : NameOf(function));
  (void)EnqueueData(on, "kernel", {});
  return Answer(cudaSuccess);
}

struct Configuration {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};
thread_local Configuration pushed;

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is cudart's interface

extern "C" {
#pragma GCC visibility push(default)

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  Kernels& kernels = TheKernels();
  const std::lock_guard lock(kernels.mutex);
  kernels.names[host_function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return Launch(kernel, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return Launch(function, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t,
                                        cudaStream_t stream) {
  return Launch(function, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void**) {
  return Launch(function, configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = 90;
  attributes->ptxVersion = 90;
  return Answer(cudaSuccess);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return Answer(cudaSuccess); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return Answer(cudaSuccess);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                   unsigned int) {
  *blocks = 1;
  return Answer(cudaSuccess);
}
// In null mode a variable of the device is memory that nobody reads.
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  if (!TheSettings().null) return Refuse(symbol);
  constexpr std::size_t kAnyVariableBytes = std::size_t{1} << 16;
  return cudaMalloc(address, kAnyVariableBytes);
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void*, size_t, size_t, cudaMemcpyKind) {
  return TheSettings().null ? Answer(cudaSuccess) : Refuse(symbol);
}

#pragma GCC visibility pop
}
