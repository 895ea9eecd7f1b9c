// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "shardplan/executor/backends.h"

namespace shardplan::executor {

Status CheckCuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return {};
  return MakeError(ErrorCode::kEnvironment, fmt::format("{}: {}", what, cudaGetErrorString(result)));
}

bool CudaIsAvailable(std::string* reason) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (result == cudaSuccess && count > 0) return true;
  if (reason != nullptr) *reason = result == cudaSuccess ? "no CUDA device" : cudaGetErrorString(result);
  return false;
}

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

Result<std::unique_ptr<TorchDevice>> MakeCudaDevice(int device_index, MemorySource memory) {
  std::string reason;
  if (!CudaIsAvailable(&reason)) return MakeError(ErrorCode::kEnvironment, "no GPU can be used: " + reason);
  const int count = CudaDeviceCount();
  if (device_index < 0 || device_index >= count) {
    Error error = {ErrorCode::kEnvironment, "this machine has no such GPU", {}, {}, {}, {}};
    error.found = fmt::format("GPU {}", device_index);
    error.expected = fmt::format("0 to {}", count - 1);
    return std::unexpected(std::move(error));
  }
  return std::make_unique<CudaDevice>(device_index, memory);
}

CudaDevice::~CudaDevice() {
  for (cudaEvent_t event : events_) (void)cudaEventDestroy(event);
  for (cudaEvent_t event : marks_) (void)cudaEventDestroy(event);
  if (clock_mark_ != nullptr) (void)cudaEventDestroy(clock_mark_);
  for (const std::vector<Left>& of_buffer : left_) {
    for (const Left& left : of_buffer) (void)cudaEventDestroy(left.event);
  }
}

Status CudaDevice::PrepareStreams(const Plan& plan) {
  const OnDevice guard = Here();
  for (std::size_t s = 0; s < plan.streams.size(); ++s) {
    streams_.push_back(s == 0 ? c10::cuda::getCurrentCUDAStream()
                              : c10::cuda::getStreamFromPool(plan.streams[s].priority < 0));
  }
  left_.resize(plan.buffers.size());
  recorded_.resize(plan.events.size(), false);
  for (std::size_t e = 0; e < plan.events.size(); ++e) {
    cudaEvent_t event = nullptr;
    if (Status status =
            CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
        !status) {
      return status;
    }
    events_.push_back(event);
  }
  return {};
}

at::Tensor CudaDevice::MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) {
  const at::TensorOptions options(ToScalarType(dtype));
  if (memory == MemoryKind::kHost) return at::empty({numel}, options.device(c10::kCPU));
  if (memory == MemoryKind::kPinnedHost)
    return at::empty({numel}, options.device(c10::kCPU).pinned_memory(true));
  c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
  return at::empty({numel}, options.device(torch_device()));
}

void CudaDevice::FillStorage(const at::Tensor& tensor, std::int64_t bytes, MemoryKind memory,
                             StreamId stream) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (memory != MemoryKind::kDevice) {
    const at::Tensor filled = MakeTensor(bytes, DType::kUInt8, memory, stream);
    storage->set_data_ptr_noswap(std::move(filled.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
  } else if (bytes > 0) {
    c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
    storage->set_data_ptr_noswap(
        c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<std::size_t>(bytes)));
  } else {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, torch_device()));
  }
  storage->set_nbytes(static_cast<std::size_t>(bytes));
}

// NCCL's own memory can be registered with its communicators; without NCCL's help it is the allocator's.
at::Tensor CudaDevice::MakeArena(std::int64_t bytes) {
  const OnDevice guard = Here();
  const at::TensorOptions options = at::TensorOptions(at::kByte).device(torch_device());
  void* memory = nullptr;
  if (bytes > 0 && ncclMemAlloc(&memory, static_cast<std::size_t>(bytes)) == ncclSuccess) {
    return at::from_blob(
        memory, {bytes}, [](void* pointer) { (void)ncclMemFree(pointer); }, options);
  }
  (void)cudaGetLastError();
  return at::empty({bytes}, options);
}

Status CudaDevice::BeforeReuse(BufferId buffer, StreamId stream) {
  const OnDevice guard = Here();
  for (Left& left : left_[buffer]) {
    if (!std::exchange(left.pending, false)) continue;
    const cudaError_t result = cudaStreamWaitEvent(streams_[std::max(stream, 0)].stream(), left.event, 0);
    if (Status status = CheckCuda(result, "waiting for an event"); !status) return status;
  }
  return {};
}

Result<CudaDevice::Left*> CudaDevice::LeftOf(BufferId buffer, StreamId stream) {
  const auto found = std::ranges::find(left_[buffer], stream, &Left::stream);
  if (found != left_[buffer].end()) return &*found;
  Left left = {.stream = stream};
  const cudaError_t made = cudaEventCreateWithFlags(&left.event, cudaEventDisableTiming);
  if (Status status = CheckCuda(made, "making an event"); !status) return std::unexpected(status.error());
  return &left_[buffer].emplace_back(left);
}

Status CudaDevice::BeforeFree(BufferId buffer, std::span<const StreamId> safe_after) {
  const OnDevice guard = Here();
  if (IsInArena(buffer)) {
    for (const StreamId stream : safe_after) {
      const Result<Left*> left = LeftOf(buffer, stream);
      if (!left) return std::unexpected(left.error());
      (*left)->pending = true;
      const cudaError_t recorded = cudaEventRecord((*left)->event, streams_[stream].stream());
      if (Status status = CheckCuda(recorded, "recording an event"); !status) return status;
    }
    return {};
  }
  for (const StreamId stream : safe_after) {
    for (const at::Tensor& part : Tensors(buffer)) {
      if (part.is_cuda()) {
        c10::cuda::CUDACachingAllocator::recordStream(part.storage().data_ptr(), streams_[stream]);
      }
    }
  }
  return {};
}

namespace {

// The same memory, in elements of the copy's dtype: parameters of several dtypes are gathered as bytes.
std::vector<at::Tensor> As(DType dtype, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const at::ScalarType type = ToScalarType(dtype);
    views.push_back(tensor.scalar_type() == type ? tensor : tensor.view(type));
  }
  return views;
}

}  // namespace

CudaDevice::Split CudaDevice::FindSplit(const CopySpec& spec) {
  Split split;
  if (spec.runs.empty() || !spec.zeros.empty() || spec.src_dtype != spec.dst_dtype) return split;
  split.rows = spec.runs[0].rows;
  std::int64_t offset = 0;
  for (const CopyRun& run : spec.runs) {
    const bool fits = run.rows == split.rows && run.rows > 1 && run.src_part == 0 &&
                      run.src_offset == offset && run.dst_offset == 0 && run.dst_stride == run.row_numel;
    if (!fits) return split;
    split.sizes.push_back(run.row_numel);
    offset += run.row_numel;
  }
  split.possible = spec.runs[0].src_stride == offset;
  return split;
}

Result<CopyId> CudaDevice::PrepareCopy(CopySpec spec) {
  splits_.push_back(FindSplit(spec));
  return TorchBuffers::PrepareCopy(std::move(spec));
}

// Contiguous pieces, all in one call: torch fuses them into a few kernels, conversions included.
void CudaDevice::CopyPieces(const CopySpec& spec) {
  const std::vector<at::Tensor> src = As(spec.src_dtype, Tensors(spec.src));
  const std::vector<at::Tensor> dst = As(spec.dst_dtype, Tensors(spec.dst));
  for (const ZeroRun& zero : spec.zeros) dst[zero.part].narrow(0, zero.offset, zero.numel).zero_();
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const CopyRun& run : spec.runs) {
    if (run.rows > 64 && run.src_stride != run.row_numel) {
      dst[run.dst_part]
          .as_strided({run.rows, run.row_numel}, {run.dst_stride, 1},
                      dst[run.dst_part].storage_offset() + run.dst_offset)
          .copy_(src[run.src_part].as_strided({run.rows, run.row_numel}, {run.src_stride, 1},
                                              src[run.src_part].storage_offset() + run.src_offset),
                 true);
      continue;
    }
    const bool one = run.src_stride == run.row_numel && run.dst_stride == run.row_numel;
    const std::int64_t rows = one ? 1 : run.rows;
    const std::int64_t numel = one ? run.rows * run.row_numel : run.row_numel;
    for (std::int64_t row = 0; row < rows; ++row) {
      from.push_back(src[run.src_part].narrow(0, run.src_offset + row * run.src_stride, numel));
      to.push_back(dst[run.dst_part].narrow(0, run.dst_offset + row * run.dst_stride, numel));
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from, true);
}

Status CudaDevice::Copy(CopyId id, StreamId stream) {
  c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
  const CopySpec& spec = copy(id);
  if (ReadsAsMade(spec)) {
    CopyAsMade(spec);
    return {};
  }
  const Split& split = splits_[id];
  if (!split.possible) {
    CopyPieces(spec);
    return {};
  }
  const std::vector<at::Tensor> targets = As(spec.dst_dtype, Tensors(spec.dst));
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < spec.runs.size(); ++i) {
    const at::Tensor& part = targets[spec.runs[i].dst_part];
    outputs.push_back(part.narrow(0, 0, split.rows * split.sizes[i]).view({split.rows, -1}));
  }
  const at::Tensor source = As(spec.src_dtype, Tensors(spec.src))[0];
  at::split_with_sizes_copy_out(outputs, source.view({split.rows, -1}), split.sizes, 1);
  return {};
}

Status CudaDevice::Accumulate(CopyId id, StreamId stream) {
  c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
  const CopySpec& spec = copy(id);
  if (ReadsAsMade(spec)) {
    AccumulateAsMade(spec);
    return {};
  }
  for (const CopyRun& run : spec.runs) {
    const std::int64_t numel = run.rows * run.row_numel;
    Tensors(spec.dst)[run.dst_part]
        .narrow(0, run.dst_offset, numel)
        .add_(Tensors(spec.src)[run.src_part].narrow(0, run.src_offset, numel));
  }
  return {};
}

Status CudaDevice::Scale(BufferId buffer, double divisor, StreamId stream) {
  c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
  for (at::Tensor part : Tensors(buffer)) part.div_(divisor);
  return {};
}

Status CudaDevice::Record(EventId event, StreamId stream) {
  const OnDevice guard = Here();
  recorded_[event] = true;
  return CheckCuda(cudaEventRecord(events_[event], streams_[stream].stream()), "recording an event");
}

Status CudaDevice::Wait(EventId event, StreamId stream) {
  const OnDevice guard = Here();
  if (!recorded_[event]) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan().events[event]));
  }
  return CheckCuda(cudaStreamWaitEvent(streams_[stream].stream(), events_[event], 0), "waiting for an event");
}

Result<bool> CudaDevice::HostWait(EventId event) {
  if (!recorded_[event]) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan().events[event]));
  }
  if (Status status = CheckCuda(cudaEventSynchronize(events_[event]), "waiting for an event"); !status) {
    return std::unexpected(std::move(status.error()));
  }
  return true;
}

Result<bool> CudaDevice::Synchronize() {
  const OnDevice guard = Here();
  for (const c10::cuda::CUDAStream& stream : streams_) {
    if (Status status = CheckCuda(cudaStreamSynchronize(stream.stream()), "waiting for a stream"); !status) {
      return std::unexpected(std::move(status.error()));
    }
  }
  return true;
}

// [Note: the device's clock and the host's]
// CUDA tells how long one event was after another one, as a float of milliseconds: to a microsecond within
// ten seconds. The first event is recorded on an idle stream between two looks at the host's clock; from it
// the others are found, each from one that is less than a second away. Processes that share a GPU take
// turns on it, for longer than anything here takes: of several tries the one counts whose looks are nearest.
Status CudaDevice::PrepareSpans(std::int64_t spans) {
  const OnDevice guard = Here();
  for (auto missing = 2 * spans + (clock_mark_ == nullptr ? 1 : 0) - std::ssize(marks_); missing > 0;
       --missing) {
    cudaEvent_t event = nullptr;
    if (Status status = CheckCuda(cudaEventCreate(&event), "making an event"); !status) return status;
    if (clock_mark_ == nullptr) {
      clock_mark_ = event;
    } else {
      marks_.push_back(event);
    }
  }
  marked_.assign(marks_.size(), false);
  continues_.assign(static_cast<std::size_t>(spans), -1);
  const cudaStream_t stream = streams_[0].stream();
  if (Status status = CheckCuda(cudaStreamSynchronize(stream), "waiting for a stream"); !status)
    return status;
  constexpr int kTries = 20;
  constexpr std::int64_t kNear = 20'000;
  std::int64_t nearest_ns = std::numeric_limits<std::int64_t>::max();
  cudaEvent_t mark = nullptr;
  if (Status status = CheckCuda(cudaEventCreate(&mark), "making an event"); !status) return status;
  Status status;
  for (int attempt = 0; attempt < kTries && nearest_ns > kNear && status; ++attempt) {
    const std::int64_t before_ns = SteadyNanoseconds();
    status = CheckCuda(cudaEventRecord(mark, stream), "recording an event");
    if (status) status = CheckCuda(cudaEventSynchronize(mark), "waiting for an event");
    const std::int64_t took_ns = SteadyNanoseconds() - before_ns;
    if (!status || took_ns >= nearest_ns) continue;
    nearest_ns = took_ns;
    clock_ns_ = before_ns + took_ns / 2;
    std::swap(mark, clock_mark_);
  }
  (void)cudaEventDestroy(mark);
  return status;
}

Status CudaDevice::MarkSpan(SpanId span, std::size_t end, StreamId stream) {
  const OnDevice guard = Here();
  const std::size_t mark = 2 * static_cast<std::size_t>(span) + end;
  marked_[mark] = true;
  return CheckCuda(cudaEventRecord(marks_[mark], streams_[std::max(stream, 0)].stream()),
                   "recording an event");
}

Status CudaDevice::BeginSpan(SpanId span, StreamId stream) {
  continues_[span] = -1;  // a step that was given up may have had it
  return MarkSpan(span, 0, stream);
}
Status CudaDevice::ContinueSpan(SpanId span, SpanId ended, StreamId) {
  continues_[span] = ended;
  return {};
}
Status CudaDevice::EndSpan(SpanId span, StreamId stream) { return MarkSpan(span, 1, stream); }

Result<std::int64_t> CudaDevice::TimeOf(cudaEvent_t event) {
  if (Status status = CheckCuda(cudaEventSynchronize(event), "waiting for an event"); !status)
    return std::unexpected(std::move(status.error()));
  float later_ms = 0;
  if (Status status = CheckCuda(cudaEventElapsedTime(&later_ms, clock_mark_, event), "timing an event");
      !status)
    return std::unexpected(std::move(status.error()));
  return clock_ns_ + std::llround(static_cast<double>(later_ms) * 1e6);
}

// Spans are asked for in their order.
Result<SpanTimes> CudaDevice::TimesOf(SpanId span) {
  const OnDevice guard = Here();
  constexpr std::int64_t kFar = 1'000'000'000;
  SpanTimes times;
  const std::size_t end_mark = 2 * static_cast<std::size_t>(span) + 1;
  const std::size_t mark =
      continues_[span] < 0 ? end_mark - 1 : 2 * static_cast<std::size_t>(continues_[span]) + 1;
  if (!marked_[mark] || !marked_[end_mark]) return times;
  const Result<std::int64_t> begin = TimeOf(marks_[mark]);
  if (!begin) return std::unexpected(begin.error());
  if (*begin - clock_ns_ > kFar) {
    std::swap(clock_mark_, marks_[mark]);
    marked_[mark] = false;
    clock_ns_ = *begin;
  }
  const Result<std::int64_t> end = TimeOf(marks_[end_mark]);
  if (!end) return std::unexpected(end.error());
  return SpanTimes{*begin, *end};
}

namespace {

// A tracker stays for the life of the process.
void TrackAllocations(int index, std::shared_ptr<AllocationCount> count) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
      [count = std::move(count), index](const Entry& entry) {
        if (entry.device_ != index) return;
        if (entry.action_ == Entry::ALLOC) count->Allocated(static_cast<std::int64_t>(entry.size_));
        if (entry.action_ == Entry::FREE_REQUESTED) count->Freed(static_cast<std::int64_t>(entry.size_));
      });
}

}  // namespace

void CudaDevice::CountAllocations(std::shared_ptr<AllocationCount> count) {
  TrackAllocations(index_, std::move(count));
}

DeviceFacts CudaDevice::Facts() const {
  DeviceFacts facts;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, index_) == cudaSuccess) {
    facts.name = properties.name;
    facts.memory_bytes = {static_cast<std::int64_t>(properties.totalGlobalMem)};
  }
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(index_));
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  facts.reserved_bytes = {stats.reserved_bytes[kAll].peak};
  facts.cache_releases = stats.num_alloc_retries;
  return facts;
}

std::shared_ptr<AllocationCount> CudaAllocations(int device_index) {
  static std::mutex mutex;
  static std::map<int, std::shared_ptr<AllocationCount>> counts;
  if (device_index < 0 || device_index >= CudaDeviceCount()) return nullptr;
  const std::scoped_lock lock(mutex);
  std::shared_ptr<AllocationCount>& count = counts[device_index];
  if (count) return count;
  std::int64_t allocated = 0;
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
    if (segment.device != device_index) continue;
    for (const auto& block : segment.blocks) {
      const auto requested = static_cast<std::int64_t>(block.requested_size);
      if (block.allocated) allocated += AllocationCount::Rounded(requested);
    }
  }
  count = std::make_shared<AllocationCount>(Bytes{allocated});
  TrackAllocations(device_index, count);
  return count;
}

Status CudaDevice::RunOn(StreamId stream, const std::function<void()>& work) {
  c10::cuda::CUDAStreamGuard guard(streams_[std::max(stream, 0)]);
  work();
  return {};
}

}  // namespace shardplan::executor
