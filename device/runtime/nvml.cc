// SPDX-License-Identifier: Apache-2.0
// NVML, as far as torch asks for it: expandable segments ask whether memory may be shared over a fabric.

namespace {

// nvmlReturn_t.
constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

int nvmlInit_v2() { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* /*bus*/, void** device) {
  *device = device;  // any that is not null
  return kSuccess;
}
int nvmlDeviceGetGpuFabricInfoV(void* /*device*/, void* /*info*/) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void* /*device*/, unsigned int /*link*/, void* /*type*/) {
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* /*device*/, unsigned int /*link*/, void* /*bus*/) {
  return kNotSupported;
}
int nvmlDeviceGetComputeRunningProcesses(void* /*device*/, unsigned int* count, void* /*processes*/) {
  *count = 0;  // an error of the allocator names none
  return kSuccess;
}
int nvmlSystemGetCudaDriverVersion_v2(int* /*version*/) { return kNotSupported; }

#pragma GCC visibility pop
}
