// Collectives through NCCL communicators of our own.
//
// [Note: timeouts]
// A NCCL kernel that waits for a rank that is gone never ends by itself. Every collective is followed by an
// event on its stream; a watchdog thread looks at the oldest event that has not been reached and, when it is
// older than the timeout or NCCL reports an asynchronous error, finds out who did not arrive and aborts all
// communicators, which ends the kernels. From then on Issue and Check return that error.
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <nccl.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "../arrivals.h"
#include "cuda_device.h"
#include "shardplan/executor/cuda_backend.h"

namespace shardplan::executor {
namespace {

using Clock = std::chrono::steady_clock;

std::optional<ncclDataType_t> ToNccl(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kInt64:
      return ncclInt64;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt8:
      return ncclInt8;
    case DType::kUInt8:
    case DType::kBool:
      return ncclUint8;
    default:
      return std::nullopt;
  }
}

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(CudaDevice& device, NcclOptions options)
      : device_(device), options_(std::move(options)), arrivals_(options_.store) {}
  ~NcclCollectives() override;

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override;
  Status Issue(CollectiveId id, StreamId stream) override;
  Status Check() override;
  void Abort(const std::string& reason) override;

 private:
  struct Prepared {
    CollectiveSpec spec;
    ncclDataType_t dtype = ncclFloat32;
    ncclRedOp_t op = ncclSum;
  };
  struct InFlight {
    cudaEvent_t done = nullptr;
    CollectiveId collective = -1;
    std::int64_t sequence = 0;
    Clock::time_point issued;
  };

  Status MakeWorld();
  Status MakeCommunicator(CommunicatorId id);
  Status WaitUntilReady(ncclComm_t communicator, const char* what);
  ncclResult_t Launch(const Prepared& prepared, cudaStream_t stream);
  Status Track(CollectiveId id, std::int64_t sequence, cudaStream_t stream);
  void Watch();
  void WatchOnce(std::unique_lock<std::mutex>& lock);
  std::string Describe(CollectiveId id, std::int64_t sequence) const;
  void AbortCommunicators();
  bool FinishWork();
  void Destroy(ncclComm_t communicator);
  void RegisterArena(ncclComm_t communicator);

  CudaDevice& device_;
  NcclOptions options_;
  const Plan* plan_ = nullptr;
  std::int64_t rank_ = 0;
  ncclComm_t world_ = nullptr;
  std::vector<ncclComm_t> communicators_;  // by CommunicatorId; null until the first collective on it
  std::vector<std::pair<ncclComm_t, void*>> registered_;  // handles of the arena
  std::vector<Prepared> prepared_;

  std::mutex mutex_;  // of everything below
  Arrivals arrivals_;
  std::vector<std::int64_t> issued_;  // by communicator
  std::deque<InFlight> in_flight_;
  std::vector<cudaEvent_t> unused_events_;
  std::optional<Error> failure_;
  bool aborted_ = false;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread watchdog_;
};

NcclCollectives::~NcclCollectives() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  if (!aborted_ && FinishWork()) {
    for (ncclComm_t communicator : communicators_) {
      if (communicator != world_) Destroy(communicator);
    }
    Destroy(world_);
  } else {
    AbortCommunicators();
  }
  for (const InFlight& flight : in_flight_) (void)cudaEventDestroy(flight.done);
  for (cudaEvent_t event : unused_events_) (void)cudaEventDestroy(event);
}

// What was issued is let finish, as other ranks may need this one's part. False: it does not, in time.
bool NcclCollectives::FinishWork() {
  const auto deadline = Clock::now() + options_.timeout;
  for (const InFlight& flight : in_flight_) {
    cudaError_t state = cudaEventQuery(flight.done);
    for (; state == cudaErrorNotReady && Clock::now() < deadline; state = cudaEventQuery(flight.done)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (state != cudaSuccess) return false;
  }
  return true;
}

void NcclCollectives::Destroy(ncclComm_t communicator) {
  if (communicator == nullptr) return;
  for (const auto& [of, handle] : registered_) {
    if (of == communicator) (void)ncclCommDeregister(communicator, handle);
  }
  const ncclResult_t result = ncclCommFinalize(communicator);
  const bool begun = result == ncclSuccess || result == ncclInProgress;
  if (begun && WaitUntilReady(communicator, "ending a NCCL communicator")) {
    (void)ncclCommDestroy(communicator);
  } else {
    (void)ncclCommAbort(communicator);
  }
}

// NCCL may then read and write the arena without staging. It need not allow it: an optimisation.
void NcclCollectives::RegisterArena(ncclComm_t communicator) {
  const at::Tensor& arena = device_.arena();
  if (!arena.defined() || arena.numel() == 0) return;
  void* handle = nullptr;
  const ncclResult_t result = ncclCommRegister(communicator, arena.mutable_data_ptr(),
                                               static_cast<std::size_t>(arena.numel()), &handle);
  if (result == ncclSuccess && handle != nullptr) registered_.emplace_back(communicator, handle);
}

Status NcclCollectives::Prepare(const Plan& plan, std::int64_t rank) {
  plan_ = &plan;
  rank_ = rank;
  communicators_.assign(plan.communicators.size(), nullptr);
  issued_.assign(plan.communicators.size(), 0);
  watchdog_ = std::thread([this] { Watch(); });
  return {};
}

// Non-blocking NCCL calls go on in the background.
Status NcclCollectives::WaitUntilReady(ncclComm_t communicator, const char* what) {
  const auto deadline = Clock::now() + options_.timeout;
  ncclResult_t state = ncclInProgress;
  while (true) {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    if (asked != ncclSuccess) state = asked;
    if (state != ncclInProgress || Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (state == ncclSuccess) return {};
  const char* reason = state == ncclInProgress ? "timed out" : ncclGetErrorString(state);
  return MakeError(ErrorCode::kEnvironment, fmt::format("{}: {} (rank {})", what, reason, rank_));
}

Status NcclCollectives::MakeWorld() {
  c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  ncclUniqueId id;
  try {
    const std::string key = "shardplan/nccl_id";
    if (rank_ == 0) {
      if (ncclGetUniqueId(&id) != ncclSuccess) return MakeError(ErrorCode::kEnvironment, "NCCL gives no id");
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(id.internal);
      options_.store->set(key, std::vector<std::uint8_t>(bytes, bytes + sizeof(id.internal)));
    } else {
      options_.store->wait({key}, options_.timeout);
      const std::vector<std::uint8_t> bytes = options_.store->get(key);
      std::memcpy(id.internal, bytes.data(), std::min(bytes.size(), sizeof(id.internal)));
    }
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, fmt::format("NCCL's id did not arrive: {}", exception.what()));
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result = ncclCommInitRankConfig(&world_, static_cast<int>(options_.world_size), id,
                                                     static_cast<int>(rank_), &config);
  if (result != ncclSuccess && result != ncclInProgress) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("making a NCCL communicator: {}", ncclGetErrorString(result)));
  }
  return WaitUntilReady(world_, "making the world's NCCL communicator");
}

// The first communicator of all ranks is the world's; the others are split off it.
Status NcclCollectives::MakeCommunicator(CommunicatorId id) {
  if (communicators_[id] != nullptr) return {};
  const bool fresh = world_ == nullptr;
  if (fresh) {
    if (Status status = MakeWorld(); !status) return status;
  }
  const Communicator& communicator = plan_->communicators[id];
  if (fresh && communicator.size == options_.world_size) {
    communicators_[id] = world_;
    RegisterArena(world_);
    return {};
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const auto color = static_cast<int>(GroupOf(communicator, rank_).front());
  const ncclResult_t result =
      ncclCommSplit(world_, color, static_cast<int>(rank_), &communicators_[id], &config);
  if (result != ncclSuccess && result != ncclInProgress) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("splitting a NCCL communicator: {}", ncclGetErrorString(result)));
  }
  if (Status status = WaitUntilReady(world_, "splitting the world's NCCL communicator"); !status)
    return status;
  if (Status status = WaitUntilReady(communicators_[id], "making a NCCL communicator"); !status)
    return status;
  RegisterArena(communicators_[id]);
  return {};
}

Result<CollectiveId> NcclCollectives::PrepareCollective(const CollectiveSpec& spec) {
  const std::optional<ncclDataType_t> dtype = ToNccl(spec.dtype);
  if (!dtype) {
    return MakeError(ErrorCode::kEnvironment, fmt::format("NCCL does not move {}", Name(spec.dtype)));
  }
  if (Status status = MakeCommunicator(spec.communicator); !status) return std::unexpected(status.error());
  Prepared prepared = {spec, *dtype, spec.reduce_op == ReduceOp::kAverage ? ncclAvg : ncclSum};
  if (spec.divisor != 1.0) {
    // The factor in the collective's own dtype; NCCL reads it before it returns. The communicator's end is
    // the operation's, too.
    at::Tensor factor =
        at::full({1}, 1.0 / spec.divisor, at::TensorOptions().dtype(ToScalarType(spec.dtype)));
    ncclComm_t communicator = communicators_[spec.communicator];
    const ncclResult_t made = ncclRedOpCreatePreMulSum(&prepared.op, factor.mutable_data_ptr(), *dtype,
                                                       ncclScalarHostImmediate, communicator);
    if (made != ncclSuccess) {
      return MakeError(ErrorCode::kEnvironment,
                       fmt::format("NCCL makes no sum with a divisor: {}", ncclGetErrorString(made)));
    }
  }
  prepared_.push_back(prepared);
  return static_cast<CollectiveId>(prepared_.size()) - 1;
}

ncclResult_t NcclCollectives::Launch(const Prepared& prepared, cudaStream_t stream) {
  const CollectiveSpec& spec = prepared.spec;
  const auto* src = static_cast<const std::byte*>(device_.Tensors(spec.src)[0].const_data_ptr()) +
                    spec.src_offset * SizeBytes(spec.dtype);
  void* dst = device_.Tensors(spec.dst)[0].mutable_data_ptr();
  const auto count = static_cast<std::size_t>(spec.slot_numel);
  ncclComm_t communicator = communicators_[spec.communicator];
  switch (spec.kind) {
    case CollectiveKind::kAllGather:
      return ncclAllGather(src, dst, count, prepared.dtype, communicator, stream);
    case CollectiveKind::kReduceScatter:
      return ncclReduceScatter(src, dst, count, prepared.dtype, prepared.op, communicator, stream);
    case CollectiveKind::kAllReduce:
      return ncclAllReduce(src, dst, count, prepared.dtype, prepared.op, communicator, stream);
  }
  return ncclInvalidArgument;
}

Status NcclCollectives::Issue(CollectiveId id, StreamId stream) {
  if (Status status = Check(); !status) return status;
  const Prepared& prepared = prepared_[id];
  const CommunicatorId communicator = prepared.spec.communicator;
  c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  const cudaStream_t cuda_stream = device_.stream(stream).stream();
  const ncclResult_t result = Launch(prepared, cuda_stream);
  std::int64_t sequence = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sequence = issued_[communicator]++;
  }
  if (result != ncclSuccess && result != ncclInProgress) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("{}: {}", Describe(id, sequence), ncclGetErrorString(result)));
  }
  if (result == ncclInProgress) {
    if (Status status = WaitUntilReady(communicators_[communicator], "issuing a collective"); !status)
      return status;
  }
  return Track(id, sequence, cuda_stream);
}

Status NcclCollectives::Track(CollectiveId id, std::int64_t sequence, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  cudaEvent_t event = nullptr;
  if (!unused_events_.empty()) {
    event = unused_events_.back();
    unused_events_.pop_back();
  } else if (Status status =
                 CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
             !status) {
    return status;
  }
  in_flight_.push_back({event, id, sequence, Clock::now()});
  return CheckCuda(cudaEventRecord(event, stream), "recording an event");
}

std::string NcclCollectives::Describe(CollectiveId id, std::int64_t sequence) const {
  const CollectiveSpec& spec = prepared_[id].spec;
  const char* kind = spec.kind == CollectiveKind::kAllGather       ? "all_gather"
                     : spec.kind == CollectiveKind::kReduceScatter ? "reduce_scatter"
                                                                   : "all_reduce";
  return fmt::format("{} {} on communicator {}, into {}", kind, sequence,
                     plan_->communicators[spec.communicator].name, plan_->buffers[spec.dst].name);
}

void NcclCollectives::Watch() {
  // A thread of its own begins on GPU 0, where asking for an event would make a context.
  (void)cudaSetDevice(device_.index());
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, std::chrono::milliseconds(100));
    if (!stopping_ && !failure_) WatchOnce(lock);
  }
}

void NcclCollectives::WatchOnce(std::unique_lock<std::mutex>& lock) {
  // Collectives of different streams finish in any order.
  cudaError_t error = cudaSuccess;  // of the device: no collective will finish any more
  std::erase_if(in_flight_, [&](const InFlight& flight) {
    const cudaError_t state = cudaEventQuery(flight.done);
    if (state != cudaSuccess && state != cudaErrorNotReady) error = state;
    if (state != cudaSuccess) return false;
    unused_events_.push_back(flight.done);
    return true;
  });
  (void)cudaGetLastError();
  if (in_flight_.empty()) return;
  const InFlight oldest = in_flight_.front();
  const CollectiveSpec& spec = prepared_[oldest.collective].spec;
  ncclResult_t state = ncclSuccess;
  (void)ncclCommGetAsyncError(communicators_[spec.communicator], &state);
  const bool late = Clock::now() - oldest.issued > options_.timeout;
  const bool broken = (state != ncclSuccess && state != ncclInProgress) || error != cudaSuccess;
  if (!late && !broken) return;
  const char* reason = error != cudaSuccess ? cudaGetErrorString(error)
                       : broken             ? ncclGetErrorString(state)
                                            : "timed out";
  arrivals_.Report(rank_, issued_);
  const std::vector<std::int64_t> group = GroupOf(plan_->communicators[spec.communicator], rank_);
  lock.unlock();
  const std::string missing =
      arrivals_.Missing(group, rank_, spec.communicator, oldest.sequence, std::chrono::milliseconds(3000));
  lock.lock();
  failure_ = Error{ErrorCode::kEnvironment,
                   fmt::format("{} failed: {}{}", Describe(oldest.collective, oldest.sequence),
                               missing.empty() ? "" : missing + ": ", reason),
                   {},
                   {},
                   {},
                   {}};
  AbortCommunicators();
}

void NcclCollectives::AbortCommunicators() {
  if (aborted_) return;
  aborted_ = true;
  for (ncclComm_t communicator : communicators_) {
    if (communicator != nullptr && communicator != world_) (void)ncclCommAbort(communicator);
  }
  if (world_ != nullptr) (void)ncclCommAbort(world_);
}

Status NcclCollectives::Check() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return std::unexpected(*failure_);
  return {};
}

void NcclCollectives::Abort(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  arrivals_.Report(rank_, issued_);
  if (!failure_) failure_ = Error{ErrorCode::kEnvironment, reason, {}, {}, {}, {}};
  AbortCommunicators();
}

}  // namespace

Result<std::unique_ptr<Collectives>> MakeNcclCollectives(TorchDevice& device, NcclOptions options) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  if (cuda == nullptr) return MakeError(ErrorCode::kUsage, "NCCL needs a cuda device");
  if (!options.store) return MakeError(ErrorCode::kUsage, "NCCL needs a store to exchange its id through");
  return std::make_unique<NcclCollectives>(*cuda, std::move(options));
}

}  // namespace shardplan::executor
