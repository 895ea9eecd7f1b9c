// SPDX-License-Identifier: Apache-2.0
// Collectives through NCCL communicators of our own.
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/nccl_communicators.h"
#include "replay/watchdog.h"
#include "shardplan/executor/backends.h"
#include "torch/arrivals.h"
#include "torch/bounded_store.h"

namespace shardplan::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGone{1};

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
    case DType::kUInt32:
      return ncclUint32;
    case DType::kUInt64:
      return ncclUint64;
    case DType::kUInt8:
    case DType::kBool:
      return ncclUint8;
    case DType::kFloat8E4M3FN:
      return ncclFloat8e4m3;
    case DType::kFloat8E5M2:
      return ncclFloat8e5m2;
    default:
      return std::nullopt;
  }
}

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(CudaDevice& device, NcclOptions options)
      : device_(device),
        options_(std::move(options)),
        communicators_(device, options_),
        arrivals_({options_.store, options_.peers, options_.names}),
        watchdog_(options_.timeout, std::chrono::milliseconds(100), ForWatchdog()) {}
  ~NcclCollectives() override;

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override;
  Status Issue(CollectiveId id, StreamId stream) override;
  Status BeginGroup() override;
  Status EndGroup() override;
  bool LaunchesGroups() const override { return true; }
  Status Exchange(const ByteExchange& exchange, StreamId stream) override;
  Status Check() override { return watchdog_.Check(); }
  std::vector<std::int64_t> Issued() const override { return issued_; }
  void Abort(const std::string& reason) override {
    LeaveGroup();
    watchdog_.Abort(reason);
  }

 private:
  struct Prepared {
    CollectiveSpec spec;
    ncclDataType_t dtype = ncclFloat32;
    std::size_t count = 0;  // of a slot, in elements of dtype
    ncclRedOp_t op = ncclSum;
  };
  // Collectives launched between BeginGroup and EndGroup: one communicator, one stream.
  struct Group {
    std::unique_lock<std::mutex> lock;  // owned while the group is open
    std::vector<InFlight> launched;
    cudaStream_t stream = nullptr;
  };

  ncclResult_t Launch(const Prepared& prepared, cudaStream_t stream);
  Status Launched(ncclResult_t result, const InFlight& flight);
  Status Track(InFlight flight, cudaStream_t stream);
  void LeaveGroup();
  std::string Describe(const InFlight& flight) const;
  // An exchange is in flight as -1 - communicator.
  CommunicatorId CommunicatorOf(const InFlight& flight) const {
    return flight.collective < 0 ? -1 - flight.collective : prepared_[flight.collective].spec.communicator;
  }

  Watchdog::Backend ForWatchdog();
  std::expected<bool, std::string> IsDone(const InFlight& flight);
  std::optional<std::string> WhyBroken() const;
  std::string Explain(const InFlight& flight, const std::string& reason);
  bool FinishWork();

  CudaDevice& device_;
  NcclOptions options_;
  const Plan* plan_ = nullptr;
  std::int64_t rank_ = 0;
  NcclCommunicators communicators_;
  std::vector<Prepared> prepared_;
  Arrivals arrivals_;
  // Under the watchdog's lock once it runs.
  std::vector<std::int64_t> issued_;  // by communicator
  std::vector<cudaEvent_t> unused_events_;
  Group group_;
  Watchdog watchdog_;
};

cudaEvent_t EventOf(const InFlight& flight) { return static_cast<cudaEvent_t>(flight.done); }

NcclCollectives::~NcclCollectives() {
  watchdog_.Stop();
  if (!watchdog_.aborted() && FinishWork()) {
    communicators_.Destroy();
  } else if (!watchdog_.aborted()) {
    communicators_.Abort();
  }
  for (const InFlight& flight : watchdog_.in_flight()) (void)cudaEventDestroy(EventOf(flight));
  for (cudaEvent_t event : unused_events_) (void)cudaEventDestroy(event);
}

// Lets issued work finish, as other ranks may need this one's part. False: it does not, in time.
bool NcclCollectives::FinishWork() {
  const auto deadline = Clock::now() + options_.timeout;
  for (const InFlight& flight : watchdog_.in_flight()) {
    cudaError_t state = cudaEventQuery(EventOf(flight));
    for (; state == cudaErrorNotReady && Clock::now() < deadline; state = cudaEventQuery(EventOf(flight))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (state != cudaSuccess) return false;
  }
  return true;
}

Status NcclCollectives::Prepare(const Plan& plan, std::int64_t rank) {
  plan_ = &plan;
  rank_ = rank;
  communicators_.Prepare(plan, rank);
  issued_.assign(plan.communicators.size(), 0);
  watchdog_.Start();
  return {};
}

Result<CollectiveId> NcclCollectives::PrepareCollective(const CollectiveSpec& spec) {
  Prepared prepared = {.spec = spec, .count = static_cast<std::size_t>(spec.slot_numel)};
  if (const std::optional<ncclDataType_t> dtype = ToNccl(spec.dtype)) {
    prepared.dtype = *dtype;
  } else if (spec.kind == CollectiveKind::kAllGather ||
             spec.kind == CollectiveKind::kAllToAll) {  // which compute nothing
    prepared.dtype = ncclUint8;
    prepared.count *= static_cast<std::size_t>(SizeBytes(spec.dtype));
  } else {
    return MakeError(ErrorCode::kEnvironment, fmt::format("NCCL does not add up {}", Name(spec.dtype)));
  }
  if (spec.reduce_op == ReduceOp::kAverage) prepared.op = ncclAvg;
  if (Status status = communicators_.Make(spec.communicator); !status) return std::unexpected(status.error());
  if (spec.divisor != 1.0) {
    // The factor in the collective's own dtype; NCCL reads it before it returns. The communicator's end is
    // the operation's, too.
    at::Tensor factor =
        at::full({1}, 1.0 / spec.divisor, at::TensorOptions().dtype(ToScalarType(spec.dtype)));
    ncclComm_t communicator = communicators_[spec.communicator];
    const ncclResult_t made = ncclRedOpCreatePreMulSum(&prepared.op, factor.mutable_data_ptr(),
                                                       prepared.dtype, ncclScalarHostImmediate, communicator);
    if (made != ncclSuccess) {
      return MakeError(ErrorCode::kEnvironment,
                       fmt::format("NCCL makes no sum with a divisor: {}", ncclGetErrorString(made)));
    }
  }
  prepared_.push_back(prepared);
  return static_cast<CollectiveId>(prepared_.size()) - 1;
}

// Messages between the ranks of a communicator, in one group. An empty one is not sent.
ncclResult_t LaunchMessages(const ByteExchange& exchange, ncclComm_t communicator, cudaStream_t stream) {
  ncclResult_t result = ncclGroupStart();
  for (std::size_t peer = 0; peer < exchange.send.size(); ++peer) {
    const std::span<std::byte> to = exchange.send[peer];
    const std::span<std::byte> from = exchange.receive[peer];
    const auto rank = static_cast<int>(peer);
    if (!to.empty() && result == ncclSuccess)
      result = ncclSend(to.data(), to.size(), ncclUint8, rank, communicator, stream);
    if (!from.empty() && result == ncclSuccess)
      result = ncclRecv(from.data(), from.size(), ncclUint8, rank, communicator, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

// An all_to_all as messages. The own part is one to itself.
ByteExchange MessagesOf(const CollectiveSpec& spec, std::byte* src, std::byte* dst) {
  const auto size = static_cast<std::size_t>(SizeBytes(spec.dtype));
  ByteExchange exchange{.communicator = spec.communicator};
  for (std::size_t peer = 0; peer < spec.sends.size(); ++peer) {
    const SentElements& part = spec.sends[peer];
    exchange.send.emplace_back(src + static_cast<std::size_t>(part.first) * size,
                               static_cast<std::size_t>(part.numel) * size);
    exchange.receive.emplace_back(dst, static_cast<std::size_t>(spec.receive_numel[peer]) * size);
    dst += exchange.receive.back().size();
  }
  return exchange;
}

ncclResult_t NcclCollectives::Launch(const Prepared& prepared, cudaStream_t stream) {
  const CollectiveSpec& spec = prepared.spec;
  auto* src = static_cast<std::byte*>(device_.Tensors(spec.src)[0].mutable_data_ptr()) +
              spec.src_offset * SizeBytes(spec.dtype);
  void* dst = device_.Tensors(spec.dst)[0].mutable_data_ptr();
  ncclComm_t communicator = communicators_[spec.communicator];
  switch (spec.kind) {
    case CollectiveKind::kAllGather:
      return ncclAllGather(src, dst, prepared.count, prepared.dtype, communicator, stream);
    case CollectiveKind::kReduceScatter:
      return ncclReduceScatter(src, dst, prepared.count, prepared.dtype, prepared.op, communicator, stream);
    case CollectiveKind::kAllReduce:
      return ncclAllReduce(src, dst, prepared.count, prepared.dtype, prepared.op, communicator, stream);
    case CollectiveKind::kAllToAll:
      return LaunchMessages(MessagesOf(spec, src, static_cast<std::byte*>(dst)), communicator, stream);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      break;  // the model runs its own
  }
  return ncclInvalidArgument;
}

// The status of NCCL for the launch of `flight`, and of those grouped with it. It may go on in the
// background, at the first collective of a communicator: then nothing may be issued behind it until it is
// done.
Status NcclCollectives::Launched(ncclResult_t result, const InFlight& flight) {
  ncclComm_t communicator = communicators_[CommunicatorOf(flight)];
  if (result == ncclInProgress) return communicators_.WaitUntilReady(communicator, Describe(flight).c_str());
  if (result == ncclSuccess) return {};
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("{}: {}", Describe(flight), ncclGetErrorString(result)));
}

Status NcclCollectives::Issue(CollectiveId id, StreamId stream) {
  const bool grouped = group_.lock.owns_lock();
  const std::unique_lock lock = grouped ? std::unique_lock<std::mutex>() : watchdog_.Lock();
  if (watchdog_.Failed()) return std::unexpected(*watchdog_.Failed());
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  const Prepared& prepared = prepared_[id];
  const InFlight flight = {.collective = id, .sequence = issued_[prepared.spec.communicator]++};
  const cudaStream_t cuda_stream = device_.stream(stream).stream();
  const ncclResult_t result = Launch(prepared, cuda_stream);
  if (grouped && (result == ncclSuccess || result == ncclInProgress)) {
    group_.stream = cuda_stream;
    group_.launched.push_back(flight);
    return {};
  }
  LeaveGroup();
  if (Status status = Launched(result, flight); !status) return status;
  return Track(flight, cuda_stream);
}

// The lock is kept until the group ends: communicators must not be aborted with calls on them pending.
Status NcclCollectives::BeginGroup() {
  group_.lock = watchdog_.Lock();
  Status status;
  if (watchdog_.Failed()) {
    status = std::unexpected(*watchdog_.Failed());
  } else if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) {
    status = MakeError(ErrorCode::kEnvironment,
                       fmt::format("beginning a group of collectives: {}", ncclGetErrorString(result)));
  }
  if (!status) group_ = {};
  return status;
}

// Something went wrong in the middle of a group: nobody will end it.
void NcclCollectives::LeaveGroup() {
  if (!group_.lock.owns_lock()) return;
  (void)ncclGroupEnd();
  group_ = {};
}

Status NcclCollectives::EndGroup() {
  const Group group = std::exchange(group_, {});
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  const ncclResult_t result = ncclGroupEnd();
  if (group.launched.empty()) return {};
  if (Status status = Launched(result, group.launched.front()); !status) return status;
  for (const InFlight& flight : group.launched) {
    if (Status status = Track(flight, group.stream); !status) return status;
  }
  return {};
}

Status NcclCollectives::Exchange(const ByteExchange& exchange, StreamId stream) {
  const CommunicatorId id = exchange.communicator;
  if (Status status = communicators_.Make(id); !status) return status;
  const std::unique_lock lock = watchdog_.Lock();
  if (watchdog_.Failed()) return std::unexpected(*watchdog_.Failed());
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  const InFlight flight = {.collective = -1 - id, .sequence = issued_[id]++};
  const auto moves = [](std::span<std::byte> bytes) { return !bytes.empty(); };
  if (std::ranges::none_of(exchange.send, moves) && std::ranges::none_of(exchange.receive, moves)) return {};
  const cudaStream_t cuda_stream = device_.stream(stream).stream();
  const ncclResult_t result = LaunchMessages(exchange, communicators_[id], cuda_stream);
  if (Status status = Launched(result, flight); !status) return status;
  return Track(flight, cuda_stream);
}

Status NcclCollectives::Track(InFlight flight, cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  if (!unused_events_.empty()) {
    event = unused_events_.back();
    unused_events_.pop_back();
  } else if (Status status =
                 CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
             !status) {
    return status;
  }
  flight.done = event;
  flight.issued = Clock::now();
  watchdog_.Add(flight);
  return CheckCuda(cudaEventRecord(event, stream), "recording an event");
}

std::string NcclCollectives::Describe(const InFlight& flight) const {
  if (flight.collective < 0) return DescribeExchange(*plan_, CommunicatorOf(flight), flight.sequence);
  return DescribeCollective(*plan_, prepared_[flight.collective].spec, flight.sequence);
}

Watchdog::Backend NcclCollectives::ForWatchdog() {
  return {.enter_thread = [this] { (void)cudaSetDevice(device_.index()); },
          .is_done = [this](const InFlight& flight) { return IsDone(flight); },
          .ended = [this](const InFlight& flight) { unused_events_.push_back(EventOf(flight)); },
          .is_broken = [this] { return WhyBroken(); },
          .failing = [this] { arrivals_.Report(rank_, issued_); },
          .explain = [this](const InFlight& flight,
                            const std::string& reason) { return Explain(flight, reason); },
          .abort = [this] { communicators_.Abort(); }};
}

std::expected<bool, std::string> NcclCollectives::IsDone(const InFlight& flight) {
  const cudaError_t state = cudaEventQuery(EventOf(flight));
  if (state == cudaSuccess) return true;
  (void)cudaGetLastError();
  if (state == cudaErrorNotReady) return false;
  return std::unexpected(cudaGetErrorString(state));
}

// Why what is in flight will never end. A rank that ends right after a collective may be gone before it is
// done here.
std::optional<std::string> NcclCollectives::WhyBroken() const {
  if (std::optional<std::string> broken = communicators_.IsBroken()) return broken;
  const InFlight& oldest = watchdog_.in_flight().front();
  if (Clock::now() - oldest.issued < kGone) return std::nullopt;
  if (options_.consensus) {
    const std::string here = "as planned, in " + Describe(oldest);
    if (auto why = options_.consensus->WhyInVain(CommunicatorOf(oldest), oldest.sequence, here)) return why;
  }
  return options_.peers ? options_.peers->Dead() : std::nullopt;
}

std::string NcclCollectives::Explain(const InFlight& flight, const std::string& reason) {
  const CommunicatorId communicator = CommunicatorOf(flight);
  const std::vector<std::int64_t> group = GroupOf(plan_->communicators[communicator], rank_);
  const std::string missing = arrivals_.Missing(group, rank_, communicator, flight.sequence);
  const bool says_more = !missing.empty() && missing != reason;
  return fmt::format("{}, failed: {}{}", Describe(flight), says_more ? missing + ": " : "", reason);
}

}  // namespace

Result<std::unique_ptr<Collectives>> MakeNcclCollectives(TorchDevice& device, NcclOptions options) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  if (cuda == nullptr) return MakeError(ErrorCode::kUsage, "NCCL needs a cuda device");
  if (!options.store) return MakeError(ErrorCode::kUsage, "NCCL needs a store to exchange its id through");
  options.store = MakeBoundedStore(std::move(options.store), options.timeout);
  return std::make_unique<NcclCollectives>(*cuda, std::move(options));
}

}  // namespace shardplan::executor
