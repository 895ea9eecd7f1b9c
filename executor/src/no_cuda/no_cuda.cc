// SPDX-License-Identifier: Apache-2.0
// The cuda backend of a build whose torch has no CUDA: every entry point says so.
#include "shardplan/executor/backends.h"

namespace shardplan::executor {
namespace {

constexpr const char* kReason = "this build has no CUDA: the installed torch is a CPU build";

}  // namespace

bool CudaIsAvailable(std::string* reason) {
  if (reason != nullptr) *reason = kReason;
  return false;
}

int CudaDeviceCount() { return 0; }

Result<std::unique_ptr<TorchDevice>> MakeCudaDevice(int, MemorySource) {
  return MakeError(ErrorCode::kEnvironment, kReason);
}

std::shared_ptr<AllocationCount> CudaAllocations(int) { return nullptr; }

Result<std::unique_ptr<Collectives>> MakeNcclCollectives(TorchDevice&, NcclOptions) {
  return MakeError(ErrorCode::kEnvironment, kReason);
}

}  // namespace shardplan::executor
