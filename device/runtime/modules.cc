// SPDX-License-Identifier: Apache-2.0
// The CUDA driver: modules and launches, as Triton and torch's static launcher ask for them. In null mode a
// module is without content and a launch is work without content on its stream; in the other modes nobody
// could run its kernels, and loading it is an error.
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>

#include "device/runtime/memory.h"
#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

constexpr int kRegisters = 32;
constexpr int kThreadsOfABlock = 1024;

// A handle that is only compared.
template <typename Handle>
Handle AnyHandle() {
  static int anything = 0;
  return reinterpret_cast<Handle>(&anything);
}

CUresult LoadModule(CUmodule* module) {
  if (!TheSettings().null) return CUDA_ERROR_NOT_SUPPORTED;
  *module = AnyHandle<CUmodule>();
  return CUDA_SUCCESS;
}

// A function is its name, which is kept: launches say it.
CUfunction FunctionOf(const char* name) {
  static auto* const mutex = new std::mutex();
  static auto* const names = new std::set<std::string>();
  const std::lock_guard lock(*mutex);
  return reinterpret_cast<CUfunction>(const_cast<std::string*>(&*names->insert(name).first));
}

CUresult Launch(CUfunction function, CUstream stream) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (!TheSettings().null) return CUDA_ERROR_NOT_SUPPORTED;
  if (on == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::string& name = *reinterpret_cast<const std::string*>(function);
  NoteLaunch(*on, name);
  (void)EnqueueData(on, name, {});
  return CUDA_SUCCESS;
}

CUresult PointerAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const std::optional<Memory::Range> range = Memory::Get().Find(reinterpret_cast<const void*>(pointer));
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  const bool device = range->kind == Memory::Kind::kDevice;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(value) = pointer;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned int*>(value) = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = device ? range->device : CurrentDevice();
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(value) = range->begin;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<std::size_t*>(value) = range->bytes;
      return CUDA_SUCCESS;
    default:
      *static_cast<int*>(value) = 0;
      return CUDA_SUCCESS;
  }
}

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is the driver's interface

extern "C" {
#pragma GCC visibility push(default)

CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = TheSettings().devices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(length), "%s", TheSettings().name.c_str());
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice) {
  *bytes = TheSettings().capacity_bytes;
  return CUDA_SUCCESS;
}

// Asked by CUDA's runtime where a library has it inside (cudart_static), for tables of functions that no
// header declares: whatever that library launches cannot run here.
CUresult cuGetExportTable(const void**, const CUuuid*) {
  Dl_info caller = {};
  (void)dladdr(__builtin_return_address(0), &caller);
  const std::string name = caller.dli_fname == nullptr ? "a library" : caller.dli_fname;
  static auto* const named = new std::set<std::string>();
  static auto* const mutex = new std::mutex();
  const std::lock_guard lock(*mutex);
  if (named->insert(name).second) {
    std::fprintf(
        stderr,
        "device in software: %s brings CUDA's runtime inside (cudart_static): its kernels cannot run here\n",
        name.c_str());
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
  *function = DriverFunction(symbol);
  if (status != nullptr) {
    *status = *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = CurrentDevice();
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = AnyHandle<CUcontext>();
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
  return cudaDeviceSynchronize() == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}
CUresult cuCtxGetLimit(std::size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, std::size_t) { return CUDA_SUCCESS; }

CUresult cuModuleLoad(CUmodule* module, const char*) { return LoadModule(module); }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return LoadModule(module); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned int, CUjit_option*, void**) {
  return LoadModule(module);
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = FunctionOf(name);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, std::size_t* bytes, CUmodule, const char*) {
  constexpr std::size_t kAnyVariableBytes = std::size_t{1} << 16;
  void* memory = nullptr;
  if (cudaMalloc(&memory, kAnyVariableBytes) != cudaSuccess) return CUDA_ERROR_OUT_OF_MEMORY;
  if (address != nullptr) *address = reinterpret_cast<CUdeviceptr>(memory);
  if (bytes != nullptr) *bytes = kAnyVariableBytes;
  return CUDA_SUCCESS;
}
CUresult cuLinkCreate_v2(unsigned int, CUjit_option*, void**, CUlinkState* state) {
  *state = AnyHandle<CUlinkState>();
  return CUDA_SUCCESS;
}
CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, std::size_t, const char*, unsigned int,
                          CUjit_option*, void**) {
  return CUDA_SUCCESS;
}
CUresult cuLinkComplete(CUlinkState, void** image, std::size_t* bytes) {
  static std::array<char, 1> nothing = {};
  *image = nothing.data();
  *bytes = nothing.size();
  return CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? kThreadsOfABlock
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? kRegisters
                                                                : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 1;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, std::size_t) {
  *blocks = 1;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int, unsigned int, unsigned int, unsigned int,
                        unsigned int, unsigned int, unsigned int, CUstream stream, void**, void**) {
  return Launch(function, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* configuration, CUfunction function, void**, void**) {
  return Launch(function, configuration->hStream);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int, unsigned int, unsigned int,
                                   unsigned int, unsigned int, unsigned int, unsigned int, CUstream stream,
                                   void**) {
  return Launch(function, stream);
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return PointerAttribute(value, attribute, pointer);
}
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** values,
                                CUdeviceptr pointer) {
  for (unsigned int i = 0; i < count; ++i) {
    if (const CUresult result = PointerAttribute(values[i], attributes[i], pointer); result != CUDA_SUCCESS) {
      return result;
    }
  }
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, std::size_t bytes, CUstream stream) {
  return cudaMemsetAsync(reinterpret_cast<void*>(pointer), value, bytes, stream) == cudaSuccess
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

#pragma GCC visibility pop
}
