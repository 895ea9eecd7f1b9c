// SPDX-License-Identifier: Apache-2.0
// cudart: memory and copies.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "device/runtime/memory.h"
#include "device/runtime/recorder.h"
#include "device/runtime/software_device.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

bool IsDevice(const void* pointer) {
  const auto range = Memory::Get().Find(pointer);
  return range && range->kind == Memory::Kind::kDevice;
}
bool IsPageable(const void* pointer) { return !Memory::Get().Find(pointer); }

// `kind` as the pointers are: a copy to the device has to go to device memory.
bool KindFits(const void* dst, const void* src, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) return true;
  return IsDevice(dst) == to_device && IsDevice(src) == from_device;
}

RecordedTensor BytesAt(const void* pointer, std::size_t bytes) {
  return {reinterpret_cast<std::uintptr_t>(pointer), "uint8", {static_cast<std::int64_t>(bytes)}, {}};
}

void RecordCopy(const Stream& stream, const void* dst, const void* src, std::size_t bytes) {
  Recorder* recorder = Recorder::Get();
  if (recorder == nullptr) return;
  const bool to_device = IsDevice(dst), from_device = IsDevice(src);
  std::vector<RecordedTensor> reads, writes;
  if (!IsPageable(src)) reads.push_back(BytesAt(src, bytes));
  if (!IsPageable(dst)) writes.push_back(BytesAt(dst, bytes));
  const char* direction = to_device ? (from_device ? "device_to_device" : "host_to_device")
                                    : (from_device ? "device_to_host" : "host_to_host");
  recorder->Copy(stream, direction, bytes, reads, writes);
  if (IsPageable(dst)) recorder->HostWaits(stream);
}

thread_local bool reads_zeros = false;
constexpr std::size_t kNumbersBytes = 4096;

// In null mode a few numbers are copied when the copy is issued; whole tensors are left as they are. (The
// kernels' plug-in copies tensors of integers.)
cudaError_t CopyNothing(const std::shared_ptr<Stream>& stream, void* dst, const void* src,
                        std::size_t bytes) {
  const Point point = EnqueueData(stream, "memcpy", {});
  if (bytes <= kNumbersBytes) {
    if (reads_zeros && !IsDevice(dst)) {
      std::memset(dst, 0, bytes);
    } else {
      std::memmove(dst, src, bytes);
    }
  }
  if (IsPageable(dst)) Engine::Get().Wait(point);
  return cudaSuccess;
}

// [Note: copies and the host]
// From or to pinned memory a copy is work of the stream. A copy from pageable memory is staged before the
// call returns; a copy to it is there when the call returns.
cudaError_t CopyOn(const std::shared_ptr<Stream>& stream, void* dst, const void* src, std::size_t bytes,
                   cudaMemcpyKind kind) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  if (!KindFits(dst, src, kind)) {
    Explain(cudaErrorInvalidValue, "a copy whose kind is not that of its memory");
    return cudaErrorInvalidValue;
  }
  if (!Memory::Get().Holds(dst, bytes) || !Memory::Get().Holds(src, bytes)) {
    Explain(cudaErrorInvalidValue, "a copy beyond the end of an allocation");
    return cudaErrorInvalidValue;
  }
  RecordCopy(*stream, dst, src, bytes);
  if (TheSettings().null) return CopyNothing(stream, dst, src, bytes);
  if (IsPageable(src)) {
    const auto* begin = static_cast<const unsigned char*>(src);
    auto staged = std::make_shared<std::vector<unsigned char>>(begin, begin + bytes);
    const Point point =
        EnqueueOn(stream, "memcpy", [dst, staged] { std::memcpy(dst, staged->data(), staged->size()); });
    if (IsPageable(dst)) Engine::Get().Wait(point);
    return cudaSuccess;
  }
  const Point point = EnqueueOn(stream, "memcpy", [dst, src, bytes] { std::memmove(dst, src, bytes); });
  if (IsPageable(dst)) Engine::Get().Wait(point);
  return cudaSuccess;
}

cudaError_t SetOn(const std::shared_ptr<Stream>& stream, void* pointer, int value, std::size_t bytes) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  if (!IsDevice(pointer) || !Memory::Get().Holds(pointer, bytes)) {
    Explain(cudaErrorInvalidValue, "memset of what is not one allocation of a device");
    return cudaErrorInvalidValue;
  }
  if (Recorder* recorder = Recorder::Get()) recorder->Memset(*stream, std::array{BytesAt(pointer, bytes)});
  (void)EnqueueData(stream, "memset", [=] { std::memset(pointer, value, bytes); });
  if (TheSettings().null && bytes <= kNumbersBytes) std::memset(pointer, value, bytes);
  return cudaSuccess;
}

cudaError_t Synchronously(cudaError_t issued) {
  if (issued != cudaSuccess) return issued;
  return cudaStreamSynchronize(nullptr);
}

}  // namespace

void ReadZeros(bool zeros) { reads_zeros = zeros; }

}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is cudart's interface

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return Answer(cudaSuccess);
  *pointer = Memory::Get().Allocate(CurrentDevice(), bytes);
  if (*pointer == nullptr) return Answer(cudaErrorMemoryAllocation);
  if (Recorder* recorder = Recorder::Get()) recorder->Reserved(*pointer, bytes, false, CurrentDevice());
  Poison(*pointer, bytes);
  return Answer(cudaSuccess);
}

// Waits for the whole device, as CUDA does.
cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return Answer(cudaSuccess);
  const auto range = Memory::Get().Find(pointer);
  if (range && range->kind == Memory::Kind::kDevice) Engine::Get().WaitForDevice(range->device);
  if (Recorder* recorder = Recorder::Get()) recorder->Released(pointer);
  if (Memory::Get().Free(pointer, Memory::Kind::kDevice)) return Answer(cudaSuccess);
  Explain(cudaErrorInvalidValue, "cudaFree of what is not an allocation, or no more");
  return Answer(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = Memory::Get().Available(CurrentDevice());
  *total = TheSettings().capacity_bytes;
  return Answer(cudaSuccess);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int) {
  *pointer = bytes == 0 ? nullptr : Memory::Get().AllocatePinned(bytes);
  Recorder* recorder = Recorder::Get();
  if (recorder != nullptr && *pointer != nullptr) recorder->Reserved(*pointer, bytes, true, 0);
  return Answer(*pointer == nullptr && bytes > 0 ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return Answer(cudaSuccess);
  for (int device = 0; device < TheSettings().devices; ++device) Engine::Get().WaitForDevice(device);
  if (Recorder* recorder = Recorder::Get()) recorder->Released(pointer);
  const bool freed = Memory::Get().Free(pointer, Memory::Kind::kPinned);
  return Answer(freed ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned int) {
  const Memory::Range range = {.bytes = bytes, .kind = Memory::Kind::kPinned};
  const bool fresh = Memory::Get().Register(pointer, range);
  if (Recorder* recorder = Recorder::Get(); recorder != nullptr && fresh) {
    recorder->Reserved(pointer, bytes, true, 0);
  }
  return Answer(fresh ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* pointer) {
  if (Recorder* recorder = Recorder::Get()) recorder->Released(pointer);
  const bool known = Memory::Get().Unregister(pointer);
  return Answer(known ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->device = -2;
  attributes->type = cudaMemoryTypeUnregistered;
  const auto range = Memory::Get().Find(pointer);
  if (!range) return Answer(cudaSuccess);
  const bool device = range->kind == Memory::Kind::kDevice;
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = device ? range->device : CurrentDevice();
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = device ? nullptr : const_cast<void*>(pointer);
  return Answer(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return Answer(CopyOn(StreamOf(stream), dst, src, bytes, kind));
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  return Answer(Synchronously(CopyOn(StreamOf(nullptr), dst, src, bytes, kind)));
}
cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, cudaStream_t stream) {
  return Answer(CopyOn(StreamOf(stream), dst, src, bytes, cudaMemcpyDeviceToDevice));
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error = CopyOn(StreamOf(stream), static_cast<char*>(dst) + row * dst_pitch,
                                     static_cast<const char*>(src) + row * src_pitch, width, kind);
    if (error != cudaSuccess) return Answer(error);
  }
  return Answer(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  return Answer(SetOn(StreamOf(stream), pointer, value, bytes));
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  return Answer(Synchronously(SetOn(StreamOf(nullptr), pointer, value, bytes)));
}

#pragma GCC visibility pop
}
