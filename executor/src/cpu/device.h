// SPDX-License-Identifier: Apache-2.0
// The cpu device: work runs at once, on the calling thread; only collectives are in flight.
//
// [Note: streams without threads]
// A collective that was issued on a stream and is not known to be done is pending there. Whatever runs next
// on that stream finishes it first. An event remembers what was pending when it was recorded; a wait makes
// that pending on the waiting stream as well, where it is finished by the next work. The model computes on
// streams[0] without telling us, so a wait there finishes at once.
#pragma once

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cpu/gloo_times.h"
#include "shardplan/executor/collectives.h"
#include "torch/buffers.h"

namespace shardplan::executor {

// A collective in flight.
struct PendingCollective {
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<GlooTimes> times;  // null: nobody asks
  CollectiveId collective = -1;
  std::int64_t sequence = 0;  // in its communicator
  BufferId src = -1;
  BufferId dst = -1;
  bool finished = false;
};

class CpuDevice final : public TorchBuffers {
 public:
  explicit CpuDevice(MemorySource memory) : TorchBuffers(memory) {}

  c10::Device torch_device() const override { return c10::Device(c10::kCPU); }

  Status Copy(CopyId copy, StreamId stream) override;
  Status Accumulate(CopyId copy, StreamId stream) override;
  Status Scale(BufferId buffer, double divisor, StreamId stream) override;
  Status Record(EventId event, StreamId stream) override;
  Status Wait(EventId event, StreamId stream) override;
  Result<bool> HostWait(EventId event) override;
  Result<bool> Synchronize() override;
  Status RunOn(StreamId stream, const std::function<void()>& work) override;

  void CountAllocations(std::shared_ptr<AllocationCount> count) override { count_ = std::move(count); }

  Status PrepareSpans(std::int64_t spans) override;
  Status BeginSpan(SpanId span, StreamId stream) override;
  Status EndSpan(SpanId span, StreamId stream) override;
  Result<SpanTimes> TimesOf(SpanId span) override;
  // Are times asked for of what is issued now?
  bool is_in_span() const { return in_span_; }

  // For the collectives: what is pending on the stream is finished; then `pending` is.
  Status BeginWork(StreamId stream);
  void AddPending(StreamId stream, std::shared_ptr<PendingCollective> pending);
  // How a collective is finished: waits, and says what went wrong.
  void SetFinisher(std::function<Status(PendingCollective&)> finish) { finish_ = std::move(finish); }

 protected:
  Status PrepareStreams(const Plan& plan) override;
  at::Tensor MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) override;
  void FillStorage(const at::Tensor& tensor, std::int64_t bytes, MemoryKind memory, StreamId stream) override;
  Status BeforeFree(BufferId buffer, std::span<const StreamId> safe_after) override;
  at::Tensor MakeArena(std::int64_t bytes) override;
  Status BeforeReuse(BufferId, StreamId) override { return {}; }  // what used it is done: BeforeFree

 private:
  using PendingList = std::vector<std::shared_ptr<PendingCollective>>;
  struct Span {
    SpanTimes times;
    PendingList collectives;  // that it consists of; empty: it is over
  };
  Status Finish(PendingList& list);
  Status FinishOne(PendingCollective& pending);
  std::vector<std::byte*> Pointers(BufferId buffer) const;

  std::vector<PendingList> streams_;
  std::vector<PendingList> events_;
  PendingList in_flight_;  // all that are not finished
  std::vector<bool> recorded_;
  std::shared_ptr<AllocationCount> count_;  // null: nobody counts
  bool process_counts_ = false;             // CpuAllocations
  std::function<Status(PendingCollective&)> finish_;
  std::vector<Span> spans_;
  bool in_span_ = false;
};

}  // namespace shardplan::executor
