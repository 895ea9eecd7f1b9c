// SPDX-License-Identifier: Apache-2.0
#include "recorded/lower_recording.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "cost/operator_class.h"
#include "engine/host_order.h"
#include "recorded/groups.h"
#include "recorded/work.h"

namespace shardplan::internal {
namespace {

constexpr std::size_t kMaxStreams = 100;
constexpr std::size_t kMaxLoads = 120;

template <typename Event>
concept StreamWork = requires(Event event) {
  event.stream;
  event.writes;
};

class Lowering {
 public:
  Lowering(const Recording& recording, const RecordedStep& step, const Cluster& cluster,
           const CostModel& costs)
      : recording_(recording), range_(step), cluster_(cluster), costs_(costs) {}

  Result<LoweredRecording> Run() {
    if (Status counted = CountStreams(); !counted) return std::unexpected(counted.error());
    EngineProgram& program = lowered_.program;
    program.streams = static_cast<std::int32_t>(lowered_.streams.size());
    program.communicators = static_cast<std::int32_t>(recording_.communicators.size());
    program.host_runs_kernels = cluster_.host.runs_kernels;
    program.compute_rate_ppm = cluster_.compute_rate_while_communicating_ppm;
    program.communication_rate_ppm = cluster_.communication_rate_while_computing_ppm;
    step_.first_in_stream.assign(lowered_.streams.size(), -1);
    last_in_stream_.assign(lowered_.streams.size(), -1);
    issued_to_.assign(recording_.communicators.size(), 0);
    for (number_ = range_.begin; number_ < range_.end; ++number_) {
      const Phase phase = range_.phases[number_ - range_.begin];
      if (step_.phases.empty() || step_.phases.back() != phase) step_.phases.push_back(phase);
      const Status status =
          std::visit([&](const auto& event) { return Lower(event); }, recording_.events[number_]);
      if (!status) return std::unexpected(status.error());
      if (total_ns_ > kLongestStep) {
        return MakeInputError(Pointer(), "with the costs of this cluster a step takes longer than 2^53 ns",
                              "more than a report can say", "");
      }
    }
    if (step_.phases.empty()) step_.phases.push_back(Phase::kForward);
    step_.record_slots = slots_;
    step_.queued_behind = QueuedBehind(program, step_, cluster_.host);
    program.steps.push_back(std::move(step_));
    for (const auto& [key, sum] : operators_) {
      lowered_.operators.push_back({key.first, key.second, sum.count, sum.busy_ns});
    }
    return std::move(lowered_);
  }

 private:
  struct KnownCollective {
    Nanoseconds duration_ns;
    std::int8_t loads = -1;
    std::string source;
  };

  std::string Pointer() const { return fmt::format("/events/{}", number_); }
  const EngineInstruction& Last() const { return step_.code.back(); }

  // The one with most matrix work is the engine's first.
  Status CountStreams() {
    std::map<RecordedId, std::int64_t> flops;
    for (std::size_t i = range_.begin; i < range_.end; ++i) {
      std::visit(
          [&]<typename Event>(const Event& event) {
            if constexpr (requires { event.stream; } && !std::is_same_v<Event, BlockAllocated> &&
                          !std::is_same_v<Event, BlockUsed> && !std::is_same_v<Event, BlockHeld>) {
              std::int64_t& sum = flops[event.stream];
              if constexpr (std::is_same_v<Event, IssuedKernel>) sum += 1 + event.flops;
            }
          },
          recording_.events[i]);
    }
    if (flops.size() > kMaxStreams) {
      return MakeInputError("/streams", "too many streams in a step", fmt::format("{}", flops.size()),
                            fmt::format("at most {}", kMaxStreams));
    }
    for (const auto& [stream, sum] : flops) lowered_.streams.push_back(stream);
    std::ranges::stable_sort(lowered_.streams,
                             [&](RecordedId a, RecordedId b) { return flops[a] > flops[b]; });
    for (std::size_t s = 0; s < lowered_.streams.size(); ++s) {
      own_[lowered_.streams[s]] = static_cast<std::int8_t>(s);
    }
    return {};
  }

  void Append(EngineInstruction instruction) {
    instruction.phase = static_cast<std::uint16_t>(step_.phases.size() - 1);
    total_ns_ += instruction.duration_ns + instruction.host_ns;
    const auto index = static_cast<std::int32_t>(step_.code.size());
    step_.code.push_back(instruction);
    step_.origins.push_back({});
    step_.next_in_stream.push_back(-1);
    lowered_.events.push_back(static_cast<std::int64_t>(number_));
    ++step_.plan_instructions;
    if (instruction.stream < 0) return;
    const auto stream = static_cast<std::size_t>(std::int32_t{instruction.stream});
    std::int32_t& last = last_in_stream_[stream];
    (last < 0 ? step_.first_in_stream[stream] : step_.next_in_stream[static_cast<std::size_t>(last)]) = index;
    last = index;
  }

  EngineInstruction On(RecordedId stream, EngineOp op) const {
    EngineInstruction instruction;
    instruction.op = op;
    instruction.stream = own_.at(stream);
    return instruction;
  }

  Nanoseconds IssueOf(RecordedId place) const {
    if (IsOfFramework(recording_, place)) return cluster_.host.copy_issue_ns;
    return step_.phases.back() == Phase::kOptimizer ? OptimizerIssue(cluster_.host)
                                                    : cluster_.host.operator_issue_ns;
  }

  void Count(std::string_view kind, Nanoseconds busy) {
    auto& sum =
        operators_[{std::string(kind), std::string(Name(static_cast<DeviceActivity>(step_.phases.back())))}];
    ++sum.count;
    sum.busy_ns += busy;
  }

  Status Lower(const IssuedKernel& kernel) {
    const OperatorEvent event = OperatorOf(kernel);
    EngineInstruction instruction = On(kernel.stream, EngineOp::kWork);
    instruction.work = IsOfFramework(recording_, kernel.place) ? WorkClass::kCopy : WorkClass::kCompute;
    instruction.host_ns = IssueOf(kernel.place);
    instruction.duration_ns = instruction.work == WorkClass::kCopy
                                  ? costs_.DeviceCopy(event.bytes_read, event.bytes_written)
                                  : costs_.Operator(event);
    Append(instruction);
    ++lowered_.program.modelled_operators;
    if (instruction.work == WorkClass::kCompute) {
      Count(step_.phases.back() == Phase::kOptimizer ? "optimizer"
                                                     : OperatorClasses()[OperatorClassOf(kernel.name)],
            instruction.duration_ns);
    }
    if (kernel.flops > 0) {
      const std::vector<ComputeRate>& rates = cluster_.device.matmul;
      if (std::ranges::find(rates, event.dtype, &ComputeRate::dtype) == rates.end())
        lowered_.program.dtypes_without_rate.insert(std::string(Name(event.dtype)));
      const bool again = step_.phases.back() == Phase::kBackward && IsInForward(recording_, kernel.place);
      (again ? lowered_.recomputed_flops : lowered_.flops)[event.dtype] += kernel.flops;
    }
    if (step_.phases.back() == Phase::kForward && IsEmbedding(recording_, kernel)) CountTokens(kernel);
    return {};
  }
  void CountTokens(const IssuedKernel& lookup) {
    std::int64_t looked_up = 0, rows = 0;
    for (const MemoryRegion& region : lookup.reads) {
      if (!IsFloatingPoint(region.dtype)) {
        std::int64_t indices = 1;
        for (const std::int64_t size : region.shape) indices *= size;
        looked_up = std::max(looked_up, indices);
      } else if (region.shape.size() == 2) {
        rows = std::max(rows, region.shape[0]);
      }
    }
    if (rows > vocabulary_) {  // not that of positions
      vocabulary_ = rows;
      lowered_.tokens = 0;
    }
    if (rows > 0 && rows == vocabulary_) lowered_.tokens += looked_up;
  }
  // Nothing is known but that it runs.
  Status Lower(const IssuedLaunch& launch) {
    EngineInstruction instruction = On(launch.stream, EngineOp::kWork);
    instruction.host_ns = IssueOf(launch.place);
    instruction.duration_ns = cluster_.device.kernel_overhead_ns;
    Append(instruction);
    Count("other", instruction.duration_ns);
    return {};
  }
  Status Lower(const IssuedCopy& copy) {
    EngineInstruction instruction = On(copy.stream, EngineOp::kWork);
    instruction.host_ns = IssueOf(copy.place);
    switch (copy.direction) {
      case CopyDirection::kHostToDevice:
      case CopyDirection::kDeviceToHost:
        instruction.work =
            copy.direction == CopyDirection::kHostToDevice ? WorkClass::kToDevice : WorkClass::kToHost;
        instruction.duration_ns = costs_.HostCopy(copy.size_bytes);
        break;
      case CopyDirection::kDeviceToDevice:
      case CopyDirection::kHostToHost:
        instruction.work = WorkClass::kCopy;
        instruction.duration_ns = costs_.DeviceCopy(copy.size_bytes, copy.size_bytes);
    }
    Append(instruction);
    return {};
  }
  Status Lower(const IssuedMemset& memset) {
    EngineInstruction instruction = On(memset.stream, EngineOp::kWork);
    instruction.host_ns = IssueOf(memset.place);
    instruction.work = IsOfFramework(recording_, memset.place) ? WorkClass::kCopy : WorkClass::kCompute;
    instruction.duration_ns = costs_.DeviceCopy({}, {BytesOf(memset.writes)});
    Append(instruction);
    return {};
  }

  // [Note: messages of one group] NCCL runs what is issued as one group in one kernel: an exchange with
  // several peers is an all-to-all of what this rank sends, one with a single peer is a message in both
  // directions.
  Status Lower(const IssuedCollective& issued) {
    if (issued.batch >= 0 && !batches_.insert(issued.batch).second) return {};
    Request request = {issued.kind, issued.size_bytes, issued.peer};
    const std::vector<std::int64_t> messages = MessagesOf(issued, request);
    const Result<KnownCollective> known = CostOf(issued.communicator, request);
    if (!known) return std::unexpected(known.error());
    EngineInstruction instruction = On(issued.stream, EngineOp::kWork);
    instruction.work = WorkClass::kCollective;
    instruction.loads = known->loads;
    instruction.duration_ns = known->duration_ns;
    instruction.host_ns = cluster_.host.collective_issue_ns;
    instruction.sequence = issued_to_[static_cast<std::size_t>(issued.communicator)]++;
    const auto [group, fresh] = groups_.try_emplace({request.kind, issued.communicator, known->source},
                                                    static_cast<std::int32_t>(step_.groups.size()));
    if (fresh) step_.groups.push_back({request.kind, issued.communicator, known->source, 0, {}});
    instruction.operand = group->second;
    CollectiveGroup& sum = step_.groups[static_cast<std::size_t>(group->second)];
    ++sum.count;
    sum.full_tensor_bytes += request.size_bytes;
    Append(instruction);
    return AddParts(messages, known->duration_ns);
  }

  struct Request {
    CollectiveKind kind = CollectiveKind::kAllGather;
    Bytes size_bytes;
    std::int32_t peer = -1;  // of a message
  };

  // The messages of its group, which are one request; itself, where it is no message.
  std::vector<std::int64_t> MessagesOf(const IssuedCollective& first, Request& request) const {
    if (first.batch < 0) return {static_cast<std::int64_t>(number_)};
    std::int64_t sent = 0, received = 0, other = 0;
    std::set<std::int32_t> peers;
    std::vector<std::int64_t> messages;
    for (std::size_t i = number_; i < range_.end; ++i) {
      const auto* part = std::get_if<IssuedCollective>(&recording_.events[i]);
      if (part == nullptr || part->batch != first.batch) continue;
      if (part->peer >= 0) {
        peers.insert(part->peer);
        messages.push_back(static_cast<std::int64_t>(i));
      }
      std::int64_t& sum = part->kind == CollectiveKind::kSend      ? sent
                          : part->kind == CollectiveKind::kReceive ? received
                                                                   : other;
      sum += part->size_bytes.value;
    }
    request.size_bytes = {std::max({sent, received, other})};
    if (peers.size() > 1) request = {CollectiveKind::kAllToAll, request.size_bytes, -1};
    if (messages.empty()) messages = {static_cast<std::int64_t>(number_)};
    return messages;
  }

  Status AddParts(const std::vector<std::int64_t>& messages, Nanoseconds together_ns) {
    const auto instruction = static_cast<std::int32_t>(step_.code.size()) - 1;
    if (messages.size() == 1) {
      lowered_.parts.push_back({instruction, messages.front(), together_ns});
      return {};
    }
    for (const std::int64_t message : messages) {
      const auto& issued = std::get<IssuedCollective>(recording_.events[static_cast<std::size_t>(message)]);
      const Result<KnownCollective> alone =
          CostOf(issued.communicator, {issued.kind, issued.size_bytes, issued.peer});
      if (!alone) return std::unexpected(alone.error());
      lowered_.parts.push_back({instruction, message, alone->duration_ns});
    }
    return {};
  }

  Result<KnownCollective> CostOf(RecordedId id, const Request& asked) {
    const auto [known, is_new] = known_.try_emplace({id, asked.kind, asked.size_bytes.value, asked.peer});
    if (!is_new) return known->second;
    const RecordedCommunicator& communicator = recording_.communicators[static_cast<std::size_t>(id)];
    CollectiveRequest request{.kind = asked.kind, .ranks = communicator.size};
    request.full_tensor_bytes = asked.size_bytes;
    GroupPlacement pair;
    if (asked.peer >= 0 && !communicator.ranks.empty()) {
      pair = PlacePair(cluster_, recording_.rank, communicator.ranks[static_cast<std::size_t>(asked.peer)]);
      request.ranks = 2;
      request.placements = {&pair, 1};
    } else {
      const Result<std::vector<GroupPlacement>*> placements = PlacementsOf(id);
      if (!placements) return std::unexpected(placements.error());
      request.placements = **placements;
    }
    Result<CollectiveCost> cost = costs_.Collective(request);
    if (!cost) return std::unexpected(cost.error());
    const Result<std::int8_t> loads = LoadsIndex(cost->loads);
    if (!loads) return std::unexpected(loads.error());
    known->second = {cost->duration_ns, *loads, cost->source};
    return known->second;
  }

  Result<std::vector<GroupPlacement>*> PlacementsOf(RecordedId id) {
    std::vector<GroupPlacement>& placements = placements_[id];
    if (!placements.empty()) return &placements;
    const RecordedCommunicator& recorded = recording_.communicators[static_cast<std::size_t>(id)];
    std::optional<Communicator> group = GroupOfRanks(recorded);
    if (!group) {
      group = Communicator{.name = recorded.name, .size = recorded.size, .stride = 1, .dims = {}};
      lowered_.program.notes.push_back(fmt::format(
          "the ranks of communicator {} are no digits of the rank: they are taken side by side", id));
    } else if (recorded.ranks.empty() && recorded.size > 1) {
      lowered_.program.notes.push_back(
          fmt::format("the ranks of communicator {} are not known: they are taken side by side", id));
    }
    if (RanksSpanned(*group) > kMaxRanks) {
      return MakeInputError(fmt::format("/communicators/{}", id), "too many ranks", "", "");
    }
    placements = PlaceGroups(cluster_, *group, recording_.world_size);
    return &placements;
  }

  Result<std::int8_t> LoadsIndex(const LinkLoads& loads) {
    std::vector<LinkLoads>& all = lowered_.program.loads;
    const auto found = std::ranges::find(all, loads);
    const auto index = static_cast<std::size_t>(found - all.begin());
    if (found == all.end()) all.push_back(loads);
    if (index > kMaxLoads) {
      return MakeInputError("/communicators", "too many ways to use the links", fmt::format("{}", index + 1),
                            "");
    }
    return static_cast<std::int8_t>(index);
  }

  std::int32_t AppendRecord(RecordedId stream, Nanoseconds host) {
    EngineInstruction instruction = On(stream, EngineOp::kRecord);
    instruction.operand = slots_++;
    instruction.host_ns = host;
    Append(instruction);
    return instruction.operand;
  }
  void AppendHostWait(std::int32_t slot) {
    EngineInstruction instruction;
    instruction.op = EngineOp::kHostWait;
    instruction.operand = slot;
    instruction.host_ns = cluster_.host.event_ns;
    Append(instruction);
  }
  // A record of an earlier step is over.
  std::int32_t SlotOf(std::int64_t event) const {
    const auto found = slot_of_.find(event);
    return found == slot_of_.end() ? -1 : found->second;
  }

  Status Lower(const IssuedRecord& record) {
    slot_of_[record.event] = AppendRecord(record.stream, cluster_.host.event_ns);
    return {};
  }
  Status Lower(const IssuedWait& wait) {
    EngineInstruction instruction = On(wait.stream, EngineOp::kWait);
    instruction.operand = SlotOf(wait.event);
    instruction.host_ns = cluster_.host.event_ns;
    Append(instruction);
    return {};
  }
  Status Lower(const HostWaitForEvent& wait) {
    AppendHostWait(SlotOf(wait.event));
    return {};
  }
  Status Lower(const HostWaitForStream& wait) {
    AppendHostWait(AppendRecord(wait.stream, {}));
    return {};
  }
  Status Lower(const HostWaitForDevice& wait) {
    for (const RecordedId stream : lowered_.streams) {
      const bool is_of = recording_.streams[static_cast<std::size_t>(stream)].device == wait.device;
      if (is_of) AppendHostWait(AppendRecord(stream, {}));
    }
    return {};
  }
  Status Lower(const BlockAllocated& block) {
    if (!IsOfFramework(recording_, block.place)) return {};  // a part of the operator's issue
    EngineInstruction instruction;
    instruction.host_ns = cluster_.host.allocate_ns;
    Append(instruction);
    return {};
  }
  Status Lower(const auto&) { return {}; }

  struct Sum {
    std::int64_t count = 0;
    Nanoseconds busy_ns;
  };

  const Recording& recording_;
  const RecordedStep& range_;
  const Cluster& cluster_;
  const CostModel& costs_;
  LoweredRecording lowered_;
  EngineStep step_;
  std::size_t number_ = 0;
  Nanoseconds total_ns_;
  std::map<RecordedId, std::int8_t> own_;
  std::vector<std::int32_t> last_in_stream_, issued_to_;
  std::map<std::int64_t, std::int32_t> slot_of_;
  std::int32_t slots_ = 0;
  std::map<RecordedId, std::vector<GroupPlacement>> placements_;
  std::map<std::tuple<RecordedId, CollectiveKind, std::int64_t, std::int32_t>, KnownCollective> known_;
  std::map<std::tuple<CollectiveKind, RecordedId, std::string>, std::int32_t> groups_;
  std::set<std::int32_t> batches_;
  std::map<std::pair<std::string, std::string>, Sum> operators_;
  std::int64_t vocabulary_ = 0;
};

}  // namespace

Result<LoweredRecording> LowerRecording(const Recording& recording, const RecordedStep& step,
                                        const Cluster& cluster, const CostModel& costs) {
  return Lowering(recording, step, cluster, costs).Run();
}

}  // namespace shardplan::internal
