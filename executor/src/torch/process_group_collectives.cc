// SPDX-License-Identifier: Apache-2.0
// Collectives through c10d process groups.
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpu/counted_memory.h"
#include "cpu/device.h"
#include "shardplan/executor/backends.h"
#include "torch/arrivals.h"
#include "torch/lookout.h"

namespace shardplan::executor {
namespace {

// 2.15 has new names for these, and the old ones are deprecated.
template <typename Group>
c10::intrusive_ptr<c10d::Work> AllGather(Group& group, at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}
template <typename Group>
c10::intrusive_ptr<c10d::Work> ReduceScatter(Group& group, at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
    return group.reduce_scatter_single(output, input, options);
  } else {
    return group._reduce_scatter_base(output, input, options);
  }
}
template <typename Group>
c10::intrusive_ptr<c10d::Work> AllToAll(Group& group, at::Tensor& output, at::Tensor& input,
                                        std::vector<std::int64_t>& receive, std::vector<std::int64_t>& send,
                                        const c10d::AllToAllOptions& options) {
  if constexpr (requires { group.all_to_all_single(output, input, receive, send, options); }) {
    return group.all_to_all_single(output, input, receive, send, options);
  } else {
    return group.alltoall_base(output, input, receive, send, options);
  }
}

// A collective that is not over after the first is waited for in doubling times.
constexpr std::chrono::milliseconds kFirstLook{20};
constexpr std::chrono::milliseconds kLooks{640};

// Another rank has left the plan.
struct InVain : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ProcessGroupCollectives final : public Collectives {
 public:
  ProcessGroupCollectives(TorchDevice& device, ProcessGroupOptions options)
      : device_(dynamic_cast<TorchBuffers&>(device)),
        cpu_(dynamic_cast<CpuDevice*>(&device)),
        options_(std::move(options)),
        arrivals_({options_.store, options_.peers, options_.names}) {
    if (cpu_ != nullptr) {
      cpu_->SetFinisher([this](PendingCollective& pending) { return Finish(pending); });
    }
  }

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override;
  Status Issue(CollectiveId id, StreamId stream) override;
  Status Exchange(const ByteExchange& exchange, StreamId stream) override;
  Status Check() override;
  std::vector<std::int64_t> Issued() const override { return issued_; }
  void Abort(const std::string& reason) override;

 private:
  struct Prepared {
    CollectiveSpec spec;
    c10d::ReduceOp op;
    c10d::ProcessGroup* group = nullptr;
  };
  c10::intrusive_ptr<c10d::Work> Start(const Prepared& prepared);
  Status Finish(PendingCollective& pending);
  Status Failed(CollectiveId id, std::int64_t sequence, const std::exception& exception);
  std::optional<std::string> WhyInVain(CollectiveId id, std::int64_t sequence);
  void Wait(const PendingCollective& pending);
  void WaitAtOnce(const PendingCollective& pending);
  Status Failed(CommunicatorId communicator, std::int64_t sequence, const std::string& what,
                const std::exception& exception);

  TorchBuffers& device_;
  CpuDevice* const cpu_;
  ProcessGroupOptions options_;
  Arrivals arrivals_;
  const Plan* plan_ = nullptr;
  std::int64_t rank_ = 0;
  std::vector<Prepared> prepared_;
  std::vector<std::int64_t> issued_;  // by communicator
  std::optional<Error> failure_;
  Lookout lookout_{kFirstLook, kLooks,
                   [this](CollectiveId id, std::int64_t sequence) { return WhyInVain(id, sequence); }};
};

Status ProcessGroupCollectives::Prepare(const Plan& plan, std::int64_t rank) {
  plan_ = &plan;
  rank_ = rank;
  issued_.assign(plan.communicators.size(), 0);
  for (std::size_t c = 0; c < plan.communicators.size(); ++c) {
    const Communicator& communicator = plan.communicators[c];
    if (communicator.size == 1) continue;
    const c10d::ProcessGroup* group = c < options_.groups.size() ? options_.groups[c].get() : nullptr;
    const std::int64_t found = group == nullptr ? 0 : group->getSize();
    const bool fits =
        group != nullptr && found == communicator.size && group->getRank() == RankInGroup(communicator, rank);
    if (fits) continue;
    Error error = {
        ErrorCode::kUsage,
        fmt::format("the process group of communicator {} does not fit the plan", communicator.name),
        {},
        fmt::format("/communicators/{}", c),
        {},
        {}};
    error.found = group == nullptr ? "none" : fmt::format("rank {} of {}", group->getRank(), found);
    error.expected = fmt::format("rank {} of {}", RankInGroup(communicator, rank), communicator.size);
    return std::unexpected(std::move(error));
  }
  return {};
}

Result<CollectiveId> ProcessGroupCollectives::PrepareCollective(const CollectiveSpec& spec) {
  const bool average = spec.reduce_op == ReduceOp::kAverage;
  prepared_.push_back(
      {spec, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, options_.groups[spec.communicator].get()});
  return static_cast<CollectiveId>(prepared_.size()) - 1;
}

// The parts one behind the other; a view where they lie so.
at::Tensor InARow(const at::Tensor& tensor, const std::vector<SentElements>& parts) {
  std::vector<at::Tensor> pieces;
  std::int64_t begin = -1;
  std::int64_t end = -1;
  bool is_row = true;
  for (const SentElements& part : parts) {
    if (part.numel == 0) continue;
    if (begin < 0) begin = end = part.first;
    is_row = is_row && part.first == end;
    end = part.first + part.numel;
    pieces.push_back(tensor.narrow(0, part.first, part.numel));
  }
  if (pieces.empty()) return tensor.narrow(0, 0, 0);
  return is_row ? tensor.narrow(0, begin, end - begin) : at::cat(pieces);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupCollectives::Start(const Prepared& prepared) {
  const Uncounted backend;
  const CollectiveSpec& spec = prepared.spec;
  at::Tensor src = device_.Tensors(spec.src)[0];
  at::Tensor dst = device_.Tensors(spec.dst)[0];
  if (spec.divisor != 1.0) {  // only NCCL divides while it sums
    src = spec.kind == CollectiveKind::kAllReduce ? src.div_(spec.divisor) : src.div(spec.divisor);
  }
  switch (spec.kind) {
    case CollectiveKind::kAllGather: {
      c10d::AllgatherOptions options;
      options.timeout = options_.timeout;
      at::Tensor input = src.narrow(0, spec.src_offset, spec.slot_numel);
      return AllGather(*prepared.group, dst, input, options);
    }
    case CollectiveKind::kReduceScatter: {
      c10d::ReduceScatterOptions options;
      options.reduceOp = prepared.op;
      options.timeout = options_.timeout;
      return ReduceScatter(*prepared.group, dst, src, options);
    }
    case CollectiveKind::kAllReduce: {
      c10d::AllreduceOptions options;
      options.reduceOp = prepared.op;
      options.timeout = options_.timeout;
      std::vector<at::Tensor> tensors = {src};
      return prepared.group->allreduce(tensors, options);
    }
    case CollectiveKind::kAllToAll: {
      c10d::AllToAllOptions options;
      options.timeout = options_.timeout;
      // Bytes move: nothing is computed, and not every backend has every dtype.
      std::vector<std::int64_t> receive;
      for (const std::int64_t numel : spec.receive_numel) receive.push_back(numel * SizeBytes(spec.dtype));
      std::vector<std::int64_t> send;
      for (const SentElements& part : spec.sends) send.push_back(part.numel * SizeBytes(spec.dtype));
      at::Tensor input = InARow(src, spec.sends).view(at::kByte);
      at::Tensor output =
          dst.view(at::kByte).narrow(0, 0, std::accumulate(receive.begin(), receive.end(), std::int64_t{0}));
      return AllToAll(*prepared.group, output, input, receive, send, options);
    }
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      break;  // the model runs its own
  }
  return {};
}

Status ProcessGroupCollectives::Issue(CollectiveId id, StreamId stream) {
  if (failure_) return std::unexpected(*failure_);
  if (cpu_ != nullptr) {
    if (Status status = cpu_->BeginWork(stream); !status) return status;
  }
  const Prepared& prepared = prepared_[id];
  const std::int64_t sequence = issued_[prepared.spec.communicator]++;
  auto pending = std::make_shared<PendingCollective>();
  std::optional<TimedIssue> timed;
  if (cpu_ != nullptr && cpu_->is_in_span()) [[unlikely]] {
    pending->times = std::make_shared<GlooTimes>();
    timed.emplace(pending->times);
  }
  try {
    pending->work = Start(prepared);
  } catch (const std::exception& exception) {
    return Failed(id, sequence, exception);
  }
  pending->collective = id;
  pending->sequence = sequence;
  pending->src = prepared.spec.src;
  pending->dst = prepared.spec.dst;
  if (cpu_ == nullptr) return Finish(*pending);
  cpu_->AddPending(stream, std::move(pending));
  return {};
}

Status ProcessGroupCollectives::Finish(PendingCollective& pending) {
  if (failure_) return std::unexpected(*failure_);
  try {
    if (pending.work) Wait(pending);
  } catch (const InVain& why) {
    Abort(why.what());
    return std::unexpected(*failure_);
  } catch (const std::exception& exception) {
    return Failed(pending.collective, pending.sequence, exception);
  }
  return {};
}

std::optional<std::string> ProcessGroupCollectives::WhyInVain(CollectiveId id, std::int64_t sequence) {
  const CollectiveSpec& spec = prepared_[id].spec;
  return options_.consensus->WhyInVain(spec.communicator, sequence,
                                       "as planned, in " + DescribeCollective(*plan_, spec, sequence));
}

// From time to time it is looked whether another rank has left the plan, and will not come.
void ProcessGroupCollectives::Wait(const PendingCollective& pending) {
  if (!options_.consensus) return (void)pending.work->wait(options_.timeout);
  if (prepared_[pending.collective].spec.kind == CollectiveKind::kReduceScatter) return WaitAtOnce(pending);
  const auto why = WaitAndLook(*pending.work, options_.timeout, kFirstLook, kLooks,
                               [&] { return WhyInVain(pending.collective, pending.sequence); });
  if (why) throw InVain(*why);
}

void ProcessGroupCollectives::WaitAtOnce(const PendingCollective& pending) {
  lookout_.Begin(pending.collective, pending.sequence);
  try {
    pending.work->wait(options_.timeout);
  } catch (const std::exception&) {
    if (const auto why = lookout_.End()) throw InVain(*why);
    throw;
  }
  if (const auto why = lookout_.End()) throw InVain(*why);
}

// All messages of a rank are on their way before it waits for one; those of one exchange have a tag of their
// own, as a rank may be in the next one already.
Status ProcessGroupCollectives::Exchange(const ByteExchange& exchange, StreamId stream) {
  if (failure_) return std::unexpected(*failure_);
  if (cpu_ != nullptr) {
    if (Status status = cpu_->BeginWork(stream); !status) return status;
  }
  constexpr std::int64_t kTags = 1 << 20;
  const std::int64_t sequence = issued_[exchange.communicator]++;
  const auto tag = static_cast<int>(sequence % kTags);
  c10d::ProcessGroup* group = options_.groups[exchange.communicator].get();
  const auto bytes_of = [](std::span<std::byte> bytes) {
    return std::vector<at::Tensor>{at::from_blob(bytes.data(), {std::ssize(bytes)}, at::kByte)};
  };
  try {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (std::size_t rank = 0; rank < exchange.receive.size(); ++rank) {
      if (exchange.receive[rank].empty()) continue;
      std::vector<at::Tensor> bytes = bytes_of(exchange.receive[rank]);
      works.push_back(group->recv(bytes, static_cast<int>(rank), tag));
    }
    for (std::size_t rank = 0; rank < exchange.send.size(); ++rank) {
      if (exchange.send[rank].empty()) continue;
      std::vector<at::Tensor> bytes = bytes_of(exchange.send[rank]);
      works.push_back(group->send(bytes, static_cast<int>(rank), tag));
    }
    for (const c10::intrusive_ptr<c10d::Work>& work : works) work->wait(options_.timeout);
  } catch (const std::exception& exception) {
    return Failed(exchange.communicator, sequence, DescribeExchange(*plan_, exchange.communicator, sequence),
                  exception);
  }
  return {};
}

Status ProcessGroupCollectives::Failed(CollectiveId id, std::int64_t sequence,
                                       const std::exception& exception) {
  const CollectiveSpec& spec = prepared_[id].spec;
  return Failed(spec.communicator, sequence, DescribeCollective(*plan_, spec, sequence), exception);
}

Status ProcessGroupCollectives::Failed(CommunicatorId communicator, std::int64_t sequence,
                                       const std::string& what, const std::exception& exception) {
  arrivals_.Report(rank_, issued_);
  const std::string missing =
      arrivals_.Missing(GroupOf(plan_->communicators[communicator], rank_), rank_, communicator, sequence);
  const std::string said = exception.what();
  failure_ = Error{ErrorCode::kEnvironment,
                   fmt::format("{}, failed: {}{}", what, missing.empty() ? "" : missing + ": ",
                               said.substr(0, said.find('\n'))),
                   {},
                   {},
                   {},
                   {}};
  return std::unexpected(*failure_);
}

Status ProcessGroupCollectives::Check() {
  if (failure_) return std::unexpected(*failure_);
  return {};
}

// The other ranks find out by themselves: our connections close, or their timeout passes.
void ProcessGroupCollectives::Abort(const std::string& reason) {
  arrivals_.Report(rank_, issued_);
  if (!failure_) failure_ = Error{ErrorCode::kEnvironment, reason, {}, {}, {}, {}};
}

}  // namespace

std::unique_ptr<Collectives> MakeProcessGroupCollectives(TorchDevice& device, ProcessGroupOptions options) {
  return std::make_unique<ProcessGroupCollectives>(device, std::move(options));
}

}  // namespace shardplan::executor
