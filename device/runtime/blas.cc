// SPDX-License-Identifier: Apache-2.0
// cuBLAS and cuBLASLt, where nothing computes: a product is work without content on its stream. In the other
// modes no product reaches them, and each call is an error.
//
// [Note: calls with any arguments]
// A product's first argument is its handle, and nothing else is looked at: one definition with open arguments
// stands for all of them. cuBLAS's own headers would declare each with its own, so they are not included.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

constexpr int kSuccess = 0;        // CUBLAS_STATUS_SUCCESS
constexpr int kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED

struct Handle {
  cudaStream_t stream = nullptr;
};

int Answer() { return TheSettings().null ? kSuccess : kNotSupported; }

int Product(cudaStream_t stream) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (!TheSettings().null || on == nullptr) return kNotSupported;
  NoteLaunch(*on, "product");
  (void)EnqueueData(on, "product", {});
  return kSuccess;
}

// A description that nobody reads.
int Describe(void** description) {
  static int anything = 0;
  *description = &anything;
  return Answer();
}

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is cuBLAS's interface

extern "C" {
#pragma GCC visibility push(default)

int cublasCreate_v2(Handle** handle) {
  *handle = new Handle();
  return Answer();
}
int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return Answer();
}
int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return Answer();
}
int cublasSetWorkspace_v2(Handle*, void*, std::size_t) { return Answer(); }
int cublasSetMathMode(Handle*, int) { return Answer(); }
int cublasGetMathMode(Handle*, int* mode) {
  *mode = 0;
  return Answer();
}
int cublasSetPointerMode_v2(Handle*, int) { return Answer(); }
int cublasGetPointerMode_v2(Handle*, int* mode) {
  *mode = 0;
  return Answer();
}

#define PRODUCT(name) \
  int name(Handle* handle, ...) { return Product(handle->stream); }
PRODUCT(cublasCdotc_v2)
PRODUCT(cublasCdotu_v2)
PRODUCT(cublasCgelsBatched)
PRODUCT(cublasCgemmStridedBatched)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasCgemv_v2)
PRODUCT(cublasCgeqrfBatched)
PRODUCT(cublasCgetrfBatched)
PRODUCT(cublasCgetrsBatched)
PRODUCT(cublasCtrsmBatched)
PRODUCT(cublasCtrsm_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDgelsBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDgeqrfBatched)
PRODUCT(cublasDgetrfBatched)
PRODUCT(cublasDgetrsBatched)
PRODUCT(cublasDotEx)
PRODUCT(cublasDtrsmBatched)
PRODUCT(cublasDtrsm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasSgelsBatched)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSgeqrfBatched)
PRODUCT(cublasSgetrfBatched)
PRODUCT(cublasSgetrsBatched)
PRODUCT(cublasStrsmBatched)
PRODUCT(cublasStrsm_v2)
PRODUCT(cublasZdotc_v2)
PRODUCT(cublasZdotu_v2)
PRODUCT(cublasZgelsBatched)
PRODUCT(cublasZgemmStridedBatched)
PRODUCT(cublasZgemm_v2)
PRODUCT(cublasZgemv_v2)
PRODUCT(cublasZgeqrfBatched)
PRODUCT(cublasZgetrfBatched)
PRODUCT(cublasZgetrsBatched)
PRODUCT(cublasZtrsmBatched)
PRODUCT(cublasZtrsm_v2)
#undef PRODUCT

std::size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulDescCreate(void** description, int, int) { return Describe(description); }
int cublasLtMatmulDescDestroy(void*) { return Answer(); }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, std::size_t) { return Answer(); }
int cublasLtMatmulPreferenceCreate(void** description) { return Describe(description); }
int cublasLtMatmulPreferenceDestroy(void*) { return Answer(); }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, std::size_t) { return Answer(); }
int cublasLtMatrixLayoutCreate(void** description, int, std::uint64_t, std::uint64_t, std::int64_t) {
  return Describe(description);
}
int cublasLtMatrixLayoutDestroy(void*) { return Answer(); }
int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, std::size_t) { return Answer(); }
// One algorithm, without a workspace: all zeros.
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results,
                                   int* returned) {
  constexpr std::size_t kResultBytes = 96;  // sizeof(cublasLtMatmulHeuristicResult_t)
  std::memset(results, 0, kResultBytes);
  *returned = 1;
  return Answer();
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                   const void*, void*, void*, void*, const void*, void*, std::size_t, cudaStream_t stream) {
  return Product(stream);
}

#pragma GCC visibility pop
}
