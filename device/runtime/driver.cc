// SPDX-License-Identifier: Apache-2.0
// The CUDA driver, as far as torch asks for it: contexts, and the memory behind expandable segments.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <string>

#include "device/runtime/memory.h"
#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

struct Physical {
  int device = 0;
  std::size_t bytes = 0;
  int references = 1;  // the handle's, and a mapping's
};
struct Physicals {
  std::mutex mutex;
  std::map<CUmemGenericAllocationHandle, Physical> by_handle;
  std::map<CUdeviceptr, CUmemGenericAllocationHandle> mapped;
  CUmemGenericAllocationHandle next = 1;
};
Physicals& ThePhysicals() {
  static auto* const physicals = new Physicals();
  return *physicals;
}

// With the lock held.
void Drop(Physicals& physicals, CUmemGenericAllocationHandle handle) {
  Physical& physical = physicals.by_handle.at(handle);
  if (--physical.references > 0) return;
  Memory::Get().Release(physical.device, physical.bytes);
  physicals.by_handle.erase(handle);
}

}  // namespace

void* DriverFunction(const char* name) {
  void* function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  return function != nullptr ? function : dlsym(RTLD_DEFAULT, name);
}

}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is the driver's interface

extern "C" {
#pragma GCC visibility push(default)

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : "an error of the device in software";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  (void)cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device + 1));
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return cuDevicePrimaryCtxRetain(context, CurrentDevice()); }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<CUdeviceptr>(range);
  const Memory::Range whole = {.bytes = bytes, .kind = Memory::Kind::kDevice, .device = CurrentDevice()};
  return Memory::Get().Register(range, whole) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  const std::optional<Memory::Range> range = Memory::Get().Find(reinterpret_cast<const void*>(pointer));
  if (!range) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range->begin;
  if (bytes != nullptr) *bytes = range->bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  if (!Memory::Get().Unregister(reinterpret_cast<void*>(pointer))) return CUDA_ERROR_INVALID_VALUE;
  (void)munmap(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  const int device = properties->location.id;
  if (!Memory::Get().Reserve(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Physicals& physicals = ThePhysicals();
  const std::lock_guard lock(physicals.mutex);
  *handle = physicals.next++;
  physicals.by_handle[*handle] = {device, bytes, 1};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physicals& physicals = ThePhysicals();
  const std::lock_guard lock(physicals.mutex);
  if (!physicals.by_handle.contains(handle)) return CUDA_ERROR_INVALID_VALUE;
  Drop(physicals, handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  Physicals& physicals = ThePhysicals();
  const std::lock_guard lock(physicals.mutex);
  if (!physicals.by_handle.contains(handle)) return CUDA_ERROR_INVALID_VALUE;
  ++physicals.by_handle[handle].references;
  physicals.mapped[pointer] = handle;
  if (Recorder* recorder = Recorder::Get()) {
    recorder->Reserved(reinterpret_cast<void*>(pointer), bytes, false, physicals.by_handle[handle].device);
  }
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc*, size_t) {
  if (mprotect(reinterpret_cast<void*>(pointer), bytes, PROT_READ | PROT_WRITE) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Poison(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
// Its content is gone.
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  if (Recorder* recorder = Recorder::Get()) recorder->Released(reinterpret_cast<void*>(pointer));
  Physicals& physicals = ThePhysicals();
  const std::lock_guard lock(physicals.mutex);
  const auto end = physicals.mapped.lower_bound(pointer + bytes);
  for (auto mapping = physicals.mapped.lower_bound(pointer); mapping != end;) {
    Drop(physicals, mapping->second);
    mapping = physicals.mapped.erase(mapping);
  }
  void* range = reinterpret_cast<void*>(pointer);
  (void)mmap(range, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                      unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned int value, size_t count, CUstream stream) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (Recorder* recorder = Recorder::Get()) {
    const RecordedTensor words = {pointer, "int32", {static_cast<std::int64_t>(count)}, {}};
    recorder->Memset(*on, std::array{words});
  }
  (void)EnqueueData(on, "memset of words", [=] {
    auto* words = reinterpret_cast<unsigned int*>(pointer);
    for (size_t i = 0; i < count; ++i) words[i] = value;
  });
  return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int) {
  return cuMemsetD32Async(address, value, 1, stream);
}

// c10 asks for the driver's functions one by one, by name.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *function = DriverFunction(symbol);
  if (status != nullptr) {
    *status = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

#pragma GCC visibility pop
}
