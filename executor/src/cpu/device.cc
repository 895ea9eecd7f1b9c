// SPDX-License-Identifier: Apache-2.0
#include "cpu/device.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "cpu/counted_memory.h"
#include "replay/copy_resolver.h"
#include "replay/host_kernels.h"
#include "shardplan/executor/backends.h"

namespace shardplan::executor {

std::unique_ptr<TorchDevice> MakeCpuDevice(MemorySource memory) {
  return std::make_unique<CpuDevice>(memory);
}

at::Tensor CpuDevice::MakeArena(std::int64_t bytes) {
  return MakeTensor(bytes, DType::kUInt8, MemoryKind::kDevice, 0);
}

Status CpuDevice::PrepareStreams(const Plan& plan) {
  process_counts_ = CpuAllocations() != nullptr;
  streams_.resize(plan.streams.size());
  events_.resize(plan.events.size());
  recorded_.resize(plan.events.size(), false);
  return {};
}

namespace {

// Memory that `count`, if any, knows of until it is freed.
c10::DataPtr AllocateCounted(std::int64_t bytes, const std::shared_ptr<AllocationCount>& count) {
  if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(bytes));
  if (count == nullptr) return memory;
  count->Allocated(bytes);
  void* data = memory.mutable_get();
  auto counted = std::make_unique<CountedMemory>(std::move(memory), count, bytes);
  return {data, counted.release(), &FreeCounted, c10::Device(c10::kCPU)};
}

}  // namespace

at::Tensor CpuDevice::MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId) {
  const at::TensorOptions options = at::TensorOptions(ToScalarType(dtype)).device(c10::kCPU);
  if (count_ == nullptr || memory != MemoryKind::kDevice) return at::empty({numel}, options);
  at::Tensor tensor = at::empty({0}, options);
  FillStorage(tensor, numel * SizeBytes(dtype), memory, 0);
  return tensor.as_strided({numel}, {1});
}

void CpuDevice::FillStorage(const at::Tensor& tensor, std::int64_t bytes, MemoryKind memory, StreamId) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(AllocateCounted(bytes, memory == MemoryKind::kDevice ? count_ : nullptr));
  storage->set_nbytes(static_cast<std::size_t>(bytes));
}

std::vector<std::byte*> CpuDevice::Pointers(BufferId buffer) const {
  std::vector<std::byte*> pointers;
  const std::vector<at::Tensor>& tensors = Tensors(buffer);
  pointers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    pointers.push_back(static_cast<std::byte*>(tensor.mutable_data_ptr()));
  }
  return pointers;
}

constexpr std::chrono::seconds kLetGoPatience{1};

Status CpuDevice::FinishOne(PendingCollective& pending) {
  if (pending.finished) return {};
  pending.finished = true;
  Status status = finish_(pending);
  // Gloo's thread holds the tensors of a collective a moment longer than until it is done.
  const auto give_up = std::chrono::steady_clock::now() + kLetGoPatience;
  while (status && (count_ != nullptr || process_counts_) && pending.work.use_count() > 1 &&
         std::chrono::steady_clock::now() < give_up)
    std::this_thread::yield();
  pending.work.reset();
  if (pending.times) pending.times->EndedBy(SteadyNanoseconds());
  std::erase_if(in_flight_, [](const auto& p) { return p->finished; });
  return status;
}

Status CpuDevice::Finish(PendingList& list) {
  for (const std::shared_ptr<PendingCollective>& pending : list) {
    if (Status status = FinishOne(*pending); !status) return status;
  }
  list.clear();
  return {};
}

Status CpuDevice::BeginWork(StreamId stream) {
  return stream < 0 || streams_[stream].empty() ? Status() : Finish(streams_[stream]);
}

void CpuDevice::AddPending(StreamId stream, std::shared_ptr<PendingCollective> pending) {
  in_flight_.push_back(pending);
  streams_[stream].push_back(std::move(pending));
}

// A collective in flight keeps the tensors it works on alive; only storage that is taken away under them must
// wait.
Status CpuDevice::BeforeFree(BufferId buffer, std::span<const StreamId>) {
  for (std::size_t i = 0; i < in_flight_.size(); ++i) {
    const std::shared_ptr<PendingCollective> pending = in_flight_[i];
    if (pending->src != buffer && pending->dst != buffer) continue;
    if (Status status = FinishOne(*pending); !status) return status;
    i = static_cast<std::size_t>(-1);
  }
  return {};
}

Status CpuDevice::Copy(CopyId id, StreamId stream) {
  if (Status status = BeginWork(stream); !status) return status;
  const CopySpec& spec = copy(id);
  if (ReadsAsMade(spec)) {
    CopyAsMade(spec);
    return {};
  }
  CopyOnHost(spec, Pointers(spec.src), Pointers(spec.dst));
  return {};
}

Status CpuDevice::Accumulate(CopyId id, StreamId stream) {
  if (Status status = BeginWork(stream); !status) return status;
  const CopySpec& spec = copy(id);
  if (ReadsAsMade(spec)) {
    AccumulateAsMade(spec);
    return {};
  }
  AccumulateOnHost(spec, Pointers(spec.src), Pointers(spec.dst));
  return {};
}

Status CpuDevice::Scale(BufferId buffer, double divisor, StreamId stream) {
  if (Status status = BeginWork(stream); !status) return status;
  const Buffer& description = plan().buffers[buffer];
  const std::vector<std::byte*> parts = Pointers(buffer);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    DivideOnHost(parts[i], PartNumel(description, static_cast<std::int32_t>(i)), description.dtype, divisor);
  }
  return {};
}

Status CpuDevice::Record(EventId event, StreamId stream) {
  events_[event] = streams_[stream];
  recorded_[event] = true;
  return {};
}

Status CpuDevice::Wait(EventId event, StreamId stream) {
  if (!recorded_[event]) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan().events[event]));
  }
  for (const std::shared_ptr<PendingCollective>& pending : events_[event]) {
    if (!pending->finished) streams_[stream].push_back(pending);
  }
  return stream == 0 ? BeginWork(stream) : Status();
}

Result<bool> CpuDevice::HostWait(EventId event) {
  if (!recorded_[event]) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan().events[event]));
  }
  if (Status status = Finish(events_[event]); !status) return std::unexpected(std::move(status.error()));
  return true;
}

Result<bool> CpuDevice::Synchronize() {
  for (PendingList& list : streams_) {
    if (Status status = Finish(list); !status) return std::unexpected(std::move(status.error()));
  }
  return true;
}

Status CpuDevice::PrepareSpans(std::int64_t spans) {
  spans_.assign(static_cast<std::size_t>(spans), {});
  return {};
}

Status CpuDevice::BeginSpan(SpanId span, StreamId stream) {
  if (Status status = BeginWork(stream); !status) return status;
  spans_[span] = {.times = {.begin_ns = SteadyNanoseconds()}, .collectives = {}};
  in_span_ = true;
  return {};
}

// Work that is pending on the stream now was issued in the span: BeginSpan has finished what was before.
Status CpuDevice::EndSpan(SpanId span, StreamId stream) {
  in_span_ = false;
  spans_[span].times.end_ns = SteadyNanoseconds();
  if (stream >= 0) spans_[span].collectives = streams_[stream];
  return {};
}

Result<SpanTimes> CpuDevice::TimesOf(SpanId id) {
  const Span& span = spans_[id];
  SpanTimes times = span.times;
  for (std::size_t i = 0; i < span.collectives.size(); ++i) {
    PendingCollective& collective = *span.collectives[i];
    if (Status status = FinishOne(collective); !status) return std::unexpected(std::move(status.error()));
    const GlooTimes* threads = collective.times.get();
    if (threads == nullptr) continue;
    const std::int64_t begin_ns = std::max(times.begin_ns, threads->begin_ns());
    times.begin_ns = i == 0 ? begin_ns : std::min(times.begin_ns, begin_ns);
    times.end_ns = std::max(times.end_ns, threads->end_ns());
  }
  return times;
}

Status CpuDevice::RunOn(StreamId stream, const std::function<void()>& work) {
  if (Status status = BeginWork(stream); !status) return status;
  work();
  return {};
}

}  // namespace shardplan::executor
