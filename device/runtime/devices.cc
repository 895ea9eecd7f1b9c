// SPDX-License-Identifier: Apache-2.0
// cudart: devices and errors.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "device/runtime/memory.h"
#include "device/runtime/recorder.h"
#include "device/runtime/software_device.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

struct Explanations {
  std::mutex mutex;
  std::map<cudaError_t, std::string> words;
};
Explanations& TheExplanations() {
  static auto* const explanations = new Explanations();
  return *explanations;
}

// Figures of an H100; a computed bandwidth must not divide by zero.
constexpr int kBusWidth = 5120, kClockKhz = 1'980'000, kMemoryClockKhz = 2'619'000;

// Shared memory of a multiprocessor. CUDA C++ Programming Guide, table of technical specifications by
// compute capability.
int SharedKib(const Settings& settings) {
  switch (settings.major * 10 + settings.minor) {
    case 70:
      return 97;  // 96 for a block
    case 80:
    case 87:
      return 164;
    case 86:
    case 89:
    case 120:
      return 100;
    default:
      return 228;
  }
}

const char* NameOf(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorPeerAccessUnsupported:
      return "cudaErrorPeerAccessUnsupported";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    default:
      return "cudaErrorUnknown";
  }
}

}  // namespace

int CurrentDevice() { return current_device; }

cudaError_t DeviceState() {
  const std::string broken = Engine::Get().WhatBrokeIt();
  if (broken.empty()) return cudaSuccess;
  Explain(cudaErrorLaunchFailure, broken);
  return cudaErrorLaunchFailure;
}

cudaError_t Answer(cudaError_t error) {
  if (error == cudaSuccess) error = DeviceState();
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

void Explain(cudaError_t error, const std::string& what) {
  Explanations& explanations = TheExplanations();
  const std::lock_guard lock(explanations.mutex);
  explanations.words[error] = std::string(NameOf(error)) + " (device in software): " + what;
}

Point EnqueueOn(const std::shared_ptr<Stream>& stream, std::string name, std::function<void()> work) {
  return Engine::Get().Enqueue(stream, {std::move(name), {}, [work = std::move(work)] {
                                          work();
                                          return true;
                                        }});
}

Point EnqueueData(const std::shared_ptr<Stream>& stream, std::string name, std::function<void()> work) {
  if (!TheSettings().null) return EnqueueOn(stream, std::move(name), std::move(work));
  return Engine::Get().Enqueue(stream, {std::move(name), {}, [] { return true; }});
}

void EnqueueKernel(cudaStream_t stream, const std::string& name, std::function<void()> work) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return;
  if (name != kPoisonTask) NoteLaunch(*on, name);
  (void)EnqueueOn(on, name, std::move(work));
}

bool FinishStream(cudaStream_t stream) { return cudaStreamSynchronize(stream) == cudaSuccess; }
std::string WhatIsBroken() { return Engine::Get().WhatBrokeIt(); }
bool ComputesNothing() { return TheSettings().null; }
bool PoisonsMemory() { return TheSettings().poison; }
void PoisonMemory(void* pointer, std::size_t bytes) { Poison(pointer, bytes); }

namespace {

// [Note: when kernels are registered]
// A kernel that is registered later replaces an earlier one, so the plug-in has to come behind
// libtorch_cuda's own registrations, and before the first tensor. Whoever uses CUDA asks for the number of
// devices first, and torch does so when all its libraries are loaded.
bool TorchIsThere() { return dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) != nullptr; }

std::string FolderOfThisLibrary() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&FolderOfThisLibrary), &info) == 0) return ".";
  const std::string path = info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

void LoadThem() {
  const std::string path = FolderOfThisLibrary() + "/libshardplan_device_kernels.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* begin = library == nullptr
                    ? nullptr
                    : reinterpret_cast<void (*)()>(dlsym(library, "shardplan_register_kernels"));
  if (begin == nullptr) {
    std::fprintf(stderr, "device in software: no kernels: %s\n", dlerror());
    std::_Exit(4);
  }
  begin();
}

}  // namespace

void LoadKernels() {
  static std::atomic<bool> begun = false;
  if (begun || !TorchIsThere() || begun.exchange(true)) return;
  LoadThem();
}

}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is cudart's interface

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaGetDeviceCount(int* count) {
  *count = TheSettings().devices;
  if (*count == 0) return Answer(cudaErrorNoDevice);
  LoadKernels();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;  // guards ask and set it in destructors, on a broken device, too
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= TheSettings().devices) return Answer(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= TheSettings().devices) return Answer(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s", TheSettings().name.c_str());
  properties->totalGlobalMem = TheSettings().capacity_bytes;
  properties->sharedMemPerBlock = 48 << 10;
  const int shared_kib = SharedKib(TheSettings());
  properties->sharedMemPerBlockOptin = static_cast<std::size_t>(shared_kib - 1) << 10;
  properties->sharedMemPerMultiprocessor = static_cast<std::size_t>(shared_kib) << 10;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->multiProcessorCount = TheSettings().multiprocessors;
  properties->major = TheSettings().major;
  properties->minor = TheSettings().minor;
  properties->memoryBusWidth = kBusWidth;
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = i == 2 ? 64 : 1024;
    properties->maxGridSize[i] = i == 0 ? 0x7FFFFFFF : 65535;
  }
  properties->l2CacheSize = 50 << 20;
  properties->concurrentKernels = 1;
  properties->unifiedAddressing = 1;
  properties->pciBusID = device + 1;
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  return Answer(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= TheSettings().devices) return Answer(cudaErrorInvalidDevice);
  cudaDeviceProp properties;
  (void)cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrClockRate:
      *value = kClockKhz;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = kMemoryClockKhz;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = kBusWidth;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMaxBlockDimX:
      *value = properties.maxThreadsDim[0];
      break;
    case cudaDevAttrMaxBlockDimY:
      *value = properties.maxThreadsDim[1];
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = properties.maxThreadsDim[2];
      break;
    case cudaDevAttrMaxGridDimX:
      *value = properties.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
      *value = properties.maxGridSize[1];
      break;
    case cudaDevAttrMaxGridDimZ:
      *value = properties.maxGridSize[2];
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = properties.regsPerBlock;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = properties.regsPerMultiprocessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = properties.maxBlocksPerMultiProcessor;
      break;
    default:
      *value = 0;
  }
  return Answer(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return Answer(cudaSuccess);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return Answer(cudaSuccess);
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return Answer(cudaErrorPeerAccessUnsupported); }

cudaError_t cudaDeviceSynchronize() {
  Engine::Get().WaitForDevice(current_device);
  AwaitDevice(current_device);
  if (Recorder* recorder = Recorder::Get()) {
    recorder->HostWaitsForDevice(current_device, __builtin_return_address(0));
  }
  return Answer(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t state = DeviceState();
  const cudaError_t error = std::exchange(last_error, cudaSuccess);
  return state != cudaSuccess ? state : error;
}
cudaError_t cudaPeekAtLastError() {
  const cudaError_t state = DeviceState();
  return state != cudaSuccess ? state : last_error;
}

const char* cudaGetErrorName(cudaError_t error) { return NameOf(error); }
const char* cudaGetErrorString(cudaError_t error) {
  Explanations& explanations = TheExplanations();
  const std::lock_guard lock(explanations.mutex);
  const auto found = explanations.words.find(error);
  if (found == explanations.words.end()) return NameOf(error);
  // Callers keep the pointer: the words of one code are never freed.
  static auto* const given = new std::vector<std::unique_ptr<std::string>>();
  given->push_back(std::make_unique<std::string>(found->second));
  return given->back()->c_str();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

#pragma GCC visibility pop
}
