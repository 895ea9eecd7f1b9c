// SPDX-License-Identifier: Apache-2.0
// The cuda device: everything is issued to CUDA streams; the order is what the plan's events make it.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "torch/buffers.h"

namespace shardplan::executor {

class CudaDevice final : public TorchBuffers {
 public:
  CudaDevice(int index, MemorySource memory) : TorchBuffers(memory), index_(index) {}
  ~CudaDevice() override;

  c10::Device torch_device() const override {
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index_));
  }

  Result<CopyId> PrepareCopy(CopySpec spec) override;
  Status Copy(CopyId copy, StreamId stream) override;
  Status Accumulate(CopyId copy, StreamId stream) override;
  Status Scale(BufferId buffer, double divisor, StreamId stream) override;
  Status Record(EventId event, StreamId stream) override;
  Status Wait(EventId event, StreamId stream) override;
  Result<bool> HostWait(EventId event) override;
  Result<bool> Synchronize() override;
  Status RunOn(StreamId stream, const std::function<void()>& work) override;

  void CountAllocations(std::shared_ptr<AllocationCount> count) override;
  DeviceFacts Facts() const override;

  Status PrepareSpans(std::int64_t spans) override;
  Status BeginSpan(SpanId span, StreamId stream) override;
  Status ContinueSpan(SpanId span, SpanId ended, StreamId stream) override;
  Status EndSpan(SpanId span, StreamId stream) override;
  Result<SpanTimes> TimesOf(SpanId span) override;

  c10::cuda::CUDAStream stream(StreamId id) const { return streams_[id]; }
  int index() const { return index_; }

 protected:
  Status PrepareStreams(const Plan& plan) override;
  at::Tensor MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) override;
  void FillStorage(const at::Tensor& tensor, std::int64_t bytes, MemoryKind memory, StreamId stream) override;
  Status BeforeFree(BufferId buffer, std::span<const StreamId> safe_after) override;
  at::Tensor MakeArena(std::int64_t bytes) override;
  Status BeforeReuse(BufferId buffer, StreamId stream) override;

 private:
  // The default stream's handle is null on every device: a call that gets it means that of the thread's
  // current device.
  using OnDevice = c10::cuda::CUDAGuard;
  OnDevice Here() const { return OnDevice(static_cast<c10::DeviceIndex>(index_)); }

  // An all-gather's copy-out: one kernel splits the rows of the source among the parts of the destination.
  struct Split {
    bool possible = false;
    std::int64_t rows = 0;
    std::vector<std::int64_t> sizes;
  };
  static Split FindSplit(const CopySpec& spec);
  void CopyPieces(const CopySpec& spec);

  const int index_;
  std::vector<c10::cuda::CUDAStream> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<bool> recorded_;
  // Work of a stream on memory of the arena that was freed since and not given to anybody.
  struct Left {
    StreamId stream = 0;
    cudaEvent_t event = nullptr;
    bool pending = false;
  };
  Result<Left*> LeftOf(BufferId buffer, StreamId stream);
  std::vector<std::vector<Left>> left_;  // by buffer
  std::vector<Split> splits_;            // by copy

  Result<std::int64_t> TimeOf(cudaEvent_t event);
  Status MarkSpan(SpanId span, std::size_t end, StreamId stream);
  std::vector<cudaEvent_t> marks_;  // of spans: the begin and the end of each
  std::vector<SpanId> continues_;   // by span: the one at whose end it begins; -1: it has a begin of its own
  std::vector<bool> marked_;        // ... since PrepareSpans
  cudaEvent_t clock_mark_ = nullptr;  // its time on the host's clock is known
  std::int64_t clock_ns_ = 0;
};

// kEnvironment with CUDA's words, unless `result` is success.
Status CheckCuda(cudaError_t result, const char* what);

}  // namespace shardplan::executor
