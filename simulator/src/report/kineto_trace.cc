// SPDX-License-Identifier: Apache-2.0
// A simulated step as torch.profiler writes a real one (Kineto's JSON), so that what reads profiles reads it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <utility>

#include "report/trace_events.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/plan_ranges.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/memory_history.h"
#include "shardplan/simulator/simulate.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

using Event = nlohmann::ordered_json;

constexpr int kMainThread = 1;
constexpr int kAutogradThread = 2;  // backwards run in one of the engine's
constexpr int kDevice = 0;

// The names of scalar types in c10.
std::string_view ScalarType(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "Double";
    case DType::kFloat32:
      return "Float";
    case DType::kFloat16:
      return "Half";
    case DType::kBFloat16:
      return "BFloat16";
    case DType::kInt64:
      return "Long";
    case DType::kInt32:
      return "Int";
    case DType::kInt16:
      return "Short";
    case DType::kInt8:
      return "Char";
    case DType::kUInt8:
      return "Byte";
    case DType::kBool:
      return "Bool";
    case DType::kFloat8E4M3FN:
      return "Float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "Float8_e5m2";
    default:
      return Name(dtype);
  }
}

std::string_view OptimizerName(OptimizerKind kind) {
  const std::string_view name = DescriptionOf(kind).pytorch;
  return name.empty() ? "Optimizer" : name;
}

// How c10d and its kernels call a collective.
struct CollectiveNames {
  std::string_view c10d;    // the operator
  std::string_view called;  // "Collective name" of Kineto
  std::string_view kernel;
};
CollectiveNames NamesOf(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return {"c10d::_allgather_base_", "_allgather_base", "ncclDevKernel_AllGather_RING_LL"};
    case CollectiveKind::kReduceScatter:
      return {"c10d::_reduce_scatter_base_", "_reduce_scatter_base",
              "ncclDevKernel_ReduceScatter_Sum_RING_LL"};
    case CollectiveKind::kAllReduce:
      return {"c10d::allreduce_", "allreduce", "ncclDevKernel_AllReduce_Sum_RING_LL"};
    case CollectiveKind::kAllToAll:
      return {"c10d::alltoall_base_", "all_to_all", "ncclDevKernel_SendRecv"};
    case CollectiveKind::kBroadcast:
      return {"c10d::broadcast_", "broadcast", "ncclDevKernel_Broadcast_RING_LL"};
    case CollectiveKind::kReduce:
      return {"c10d::reduce_", "reduce", "ncclDevKernel_Reduce_Sum_RING_LL"};
    case CollectiveKind::kGather:
      return {"c10d::gather_", "gather", "ncclDevKernel_SendRecv"};
    case CollectiveKind::kScatter:
      return {"c10d::scatter_", "scatter", "ncclDevKernel_SendRecv"};
    case CollectiveKind::kSend:
      return {"c10d::send", "send", "ncclDevKernel_SendRecv"};
    case CollectiveKind::kReceive:
      return {"c10d::recv_", "recv", "ncclDevKernel_SendRecv"};
  }
  return {};
}

// The operators that FSDP2 copies by.
std::string_view OperatorOf(InstructionKind kind) {
  const std::string_view op = DescriptionOf(kind).op;
  return op.empty() ? "aten::copy_" : op;
}

// "aten.mm.default" as PyTorch calls it: "aten::mm".
std::string ProfiledName(const std::string& name) {
  const std::size_t dot = name.find('.');
  if (dot == std::string::npos || name.find("::") != std::string::npos) return name;
  return name.substr(0, dot) + "::" + name.substr(dot + 1, name.find('.', dot + 1) - dot - 1);
}

// The first group of the communicator: that of rank 0.
std::vector<std::int64_t> RanksOf(const Communicator& communicator) {
  std::vector<CommunicatorDim> dims = communicator.dims;
  if (dims.empty()) dims.push_back({communicator.size, communicator.stride});
  std::vector<std::int64_t> ranks = {0};
  for (const CommunicatorDim& dim : dims) {
    std::vector<std::int64_t> more;
    for (std::int64_t i = 0; i < dim.size; ++i) {
      for (const std::int64_t rank : ranks) more.push_back(rank + i * dim.stride);
    }
    ranks = std::move(more);
  }
  std::ranges::sort(ranks);
  return ranks;
}

class KinetoWriter final : private PlanRanges {
 public:
  KinetoWriter(const Plan& plan, const Simulation& simulation, const Cluster& cluster)
      : PlanRanges(plan),
        plan_(plan),
        simulation_(simulation),
        cluster_(cluster),
        costs_(MakeCostModel(cluster)),
        step_(static_cast<std::int32_t>(plan.steps.size()) - 1) {
    for (const Communicator& communicator : plan.communicators) ranks_.push_back(RanksOf(communicator));
    for (const Span& span : simulation.spans) {
      if (span.step != step_) continue;
      spans_[{span.trigger, span.instruction}].push_back(&span);
      end_ = std::max(end_, span.end_ns);
    }
    begin_ = end_ - simulation.report.step_ns;
  }

  std::string Run() {
    out_ = fmt::format("{{\"schemaVersion\": 1, \"deviceProperties\": {}, \"distributedInfo\": {},\n",
                       Spaced({{{"id", kDevice},
                                {"name", cluster_.device.name},
                                {"totalGlobalMem", cluster_.device.memory_bytes.value}}}),
                       Spaced(DistributedInfo()));
    out_ += fmt::format("\"displayTimeUnit\": \"ms\", \"shardplan\": {}, \"traceEvents\": [\n",
                        Spaced({{"simulated", true},
                                {"policy", plan_.policy},
                                {"cluster", cluster_.name},
                                {"plan_digest", simulation_.report.plan_digest}}));
    NameTracks();
    const PlanStep& step = plan_.steps[static_cast<std::size_t>(step_)];
    now_ = begin_;
    for (std::size_t t = 0; t < step.triggers.size(); ++t)
      WriteTrigger(step.triggers[t], static_cast<std::int32_t>(t));
    WriteSynchronize();
    WriteMemory();
    Write(Complete("user_annotation", "ProfilerStep#0", kMainThread, begin_, end_));
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  // ---- text ----
  // With a space behind each colon, as Kineto writes: readers look for `"rank": 0`.
  static std::string Spaced(const Event& value) {
    std::string text;
    bool quoted = false, escaped = false;
    for (const char c : value.dump(-1, ' ', true, Event::error_handler_t::replace)) {
      text += c;
      if (c == '"' && !escaped) quoted = !quoted;
      escaped = c == '\\' && !escaped;
      if (c == ':' && !quoted) text += ' ';
    }
    return text;
  }

  void Write(const Event& event) {
    if (!first_) out_ += ",\n";
    first_ = false;
    out_ += event.dump(-1, ' ', true, Event::error_handler_t::replace);
  }

  static Event Complete(std::string_view category, std::string_view name, int thread, Nanoseconds from,
                        Nanoseconds to) {
    return {{"ph", "X"},
            {"cat", category},
            {"name", name},
            {"pid", internal::kTraceProcess},
            {"tid", thread},
            {"ts", internal::TraceMicroseconds(from)},
            {"dur", internal::TraceMicroseconds(to - from)},
            {"args", Event::object()}};
  }

  Event DistributedInfo() const {
    Event groups = Event::array();
    for (std::size_t c = 0; c < plan_.communicators.size(); ++c) {
      groups.push_back({{"pg_name", std::to_string(c)},
                        {"pg_desc", plan_.communicators[c].name},
                        {"backend_config", "cuda:nccl"},
                        {"pg_size", plan_.communicators[c].size},
                        {"ranks", ranks_[c]}});
    }
    return {{"backend", "nccl"},
            {"rank", 0},
            {"world_size", plan_.world_size},
            {"pg_count", groups.size()},
            {"pg_config", std::move(groups)}};
  }

  void NameTrack(int process, std::optional<int> thread, const std::string& name) {
    Write({{"ph", "M"},
           {"pid", process},
           {"tid", thread.value_or(0)},
           {"ts", internal::TraceMicroseconds(begin_)},
           {"name", thread ? "thread_name" : "process_name"},
           {"args", {{"name", name}}}});
  }

  void NameTracks() {
    NameTrack(internal::kTraceProcess, std::nullopt,
              fmt::format("{} {} rank 0 (simulated)", plan_.model, plan_.policy));
    NameTrack(internal::kTraceProcess, kMainThread, "host");
    NameTrack(internal::kTraceProcess, kAutogradThread, "host: autograd");
    NameTrack(kDevice, std::nullopt, cluster_.device.name.empty() ? cluster_.name : cluster_.device.name);
    const std::vector<std::string> streams = EngineStreams(plan_);
    for (std::size_t s = 0; s < streams.size(); ++s) {
      NameTrack(kDevice, internal::kFirstTraceStream + static_cast<int>(s),
                fmt::format("stream {} {}", internal::kFirstTraceStream + s, streams[s]));
    }
  }

  // ---- the host's clock ----
  // If the simulated host does two things at the same moment, the later one is a nanosecond later: nesting,
  // and launches inside a range, follow from the times.
  Nanoseconds Tick(Nanoseconds at = {}) {
    now_ = std::max(now_ + Nanoseconds{1}, at);
    return now_;
  }

  struct Times {
    const Span* host = nullptr;
    const Span* stream = nullptr;
    StreamId plan_streams = 0;
    std::vector<const Span*> parts;  // of a segment with collectives of the model: what has an entry

    const Span* PartAt(std::int32_t entry, bool of_model) const {
      for (const Span* span : parts) {
        if (span->entry == entry && (span->stream >= plan_streams) == of_model) return span;
      }
      return nullptr;
    }
  };
  Times TimesOf(std::int32_t trigger, std::int32_t instruction) const {
    Times times;
    times.plan_streams = static_cast<StreamId>(plan_.streams.size());
    const auto found = spans_.find({trigger, instruction});
    if (found == spans_.end()) return times;
    for (const Span* span : found->second) {
      (span->stream < 0 ? times.host : times.stream) = span;
      if (span->stream >= 0 && span->entry >= 0) times.parts.push_back(span);
    }
    return times;
  }

  // ---- ranges ----
  void Opened(std::size_t level, const std::string& name) override { open_[level] = {name, Tick(), thread_}; }
  void Closed(std::size_t level) override {
    const OpenRange& range = open_[level];
    Write(Complete("user_annotation", range.name, range.thread, range.begin_ns, Tick()));
  }

  void WriteTrigger(const Trigger& trigger, std::int32_t t) {
    const bool in_engine = trigger.kind == TriggerKind::kPreBackward ||
                           trigger.kind == TriggerKind::kPostBackward ||
                           trigger.kind == TriggerKind::kBackwardEnd;
    thread_ = in_engine ? kAutogradThread : kMainThread;
    const bool outermost = trigger.kind == TriggerKind::kPreForward && !in_forward_;
    if (trigger.kind == TriggerKind::kPreForward) in_forward_ = true;
    if (trigger.kind == TriggerKind::kPreBackward || trigger.kind == TriggerKind::kOptimizerStep)
      in_forward_ = false;
    if (const Times times = TimesOf(t, -1); times.host != nullptr) Tick(times.host->start_ns);
    EnterTrigger(trigger.kind, trigger.unit, outermost);
    bool left = false;  // the model's own work is in no range of FSDP's
    for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
      const Instruction& instruction = trigger.instructions[i];
      const bool model = instruction.kind == InstructionKind::kCompute ||
                         instruction.kind == InstructionKind::kOptimizerStep;
      if (model && !left) Leave();
      left = left || model;
      if (!model) EnterInstruction(instruction);
      WriteInstruction(trigger, instruction, TimesOf(t, static_cast<std::int32_t>(i)));
    }
    Leave();
    thread_ = kMainThread;
  }

  // ---- instructions ----
  void WriteInstruction(const Trigger& trigger, const Instruction& instruction, const Times& times) {
    switch (DescriptionOf(instruction.kind).family) {
      case InstructionFamily::kCompute:
        return WriteSegment(instruction, times);
      case InstructionFamily::kOptimizer:
        return WriteOptimizer(instruction, times);
      case InstructionFamily::kCollective:
        return WriteCollective(instruction, times);
      case InstructionFamily::kOrder:
        return WriteOrder(instruction, times);
      case InstructionFamily::kMemory:
      case InstructionFamily::kBind:
      case InstructionFamily::kCopy:
      case InstructionFamily::kScale:
        break;
    }
    if (times.stream == nullptr) {
      if (times.host != nullptr) Tick(times.host->end_ns);
      return;
    }
    WriteCopy(trigger, instruction, times);
  }

  Nanoseconds HostBegin(const Times& times) {
    return Tick(times.host ? times.host->start_ns : Nanoseconds{});
  }
  Nanoseconds HostEnd(const Times& times) {
    Tick();  // the launch begins and ends inside
    Tick();
    return Tick(times.host ? times.host->end_ns : Nanoseconds{});
  }

  // Writes a launch of the host from `from` to `to`, and its work on the device.
  void WriteLaunch(std::string_view operation, Nanoseconds from, Nanoseconds to, const Span& on,
                   Nanoseconds begin, Nanoseconds end, std::string_view kernel, Event arguments,
                   std::string_view category = "kernel") {
    const std::int64_t correlation = ++correlation_;
    Event called = Complete("cpu_op", operation, thread_, from, to);
    called["args"]["External id"] = correlation;
    for (const auto& [name, value] : arguments.items()) called["args"][name] = value;
    Write(called);
    const std::string_view function = category == "kernel" ? "cudaLaunchKernel" : "cudaMemcpyAsync";
    Event launch = Complete("cuda_runtime", function, thread_, from + Nanoseconds{1},
                            std::max(from, to - Nanoseconds{1}));
    launch["args"] = {{"External id", correlation}, {"correlation", correlation}};
    Write(launch);
    const int stream = internal::kFirstTraceStream + on.stream;
    Event work = Complete(category, kernel, stream, begin, end);
    work["pid"] = kDevice;
    work["args"] = {
        {"External id", correlation}, {"device", kDevice}, {"stream", stream}, {"correlation", correlation}};
    for (const auto& [name, value] : arguments.items()) work["args"][name] = value;
    Write(work);
    for (const bool starts : {true, false}) {
      Event arrow = {{"ph", starts ? "s" : "f"},
                     {"id", correlation},
                     {"pid", starts ? internal::kTraceProcess : kDevice},
                     {"tid", starts ? thread_ : stream},
                     {"ts", internal::TraceMicroseconds(starts ? from + Nanoseconds{1} : begin)},
                     {"cat", "ac2g"},
                     {"name", "ac2g"}};
      if (!starts) arrow["bp"] = "e";
      Write(arrow);
    }
  }

  void WriteCopy(const Trigger& trigger, const Instruction& instruction, const Times& times) {
    const bool to_host = instruction.kind == InstructionKind::kCopyToHost;
    const bool to_device = instruction.kind == InstructionKind::kCopyToDevice;
    const Nanoseconds from = HostBegin(times), to = HostEnd(times);
    const std::string kernel = to_host     ? "Memcpy DtoH (Device -> Pinned)"
                               : to_device ? "Memcpy HtoD (Pinned -> Device)"
                                           : internal::InstructionText(plan_, instruction);
    WriteLaunch(OperatorOf(instruction.kind), from, to, *times.stream, times.stream->start_ns,
                times.stream->end_ns, kernel, {{"trigger", internal::TriggerText(plan_, trigger)}},
                to_host || to_device ? "gpu_memcpy" : "kernel");
  }

  void WriteCollective(const Instruction& instruction, const Times& times) {
    const Nanoseconds from = HostBegin(times), to = HostEnd(times);
    if (times.stream == nullptr) return;
    const auto count = [&](BufferId id) {
      const Buffer& buffer = plan_.buffers[static_cast<std::size_t>(id)];
      return SizeBytes(buffer).value / SizeBytes(buffer.dtype);
    };
    const auto group = static_cast<std::size_t>(instruction.communicator);
    const BufferId output = instruction.dst >= 0 ? instruction.dst : instruction.src;
    const CollectiveNames names = NamesOf(*DescriptionOf(instruction.kind).collective);
    // A rank gathers its slot of the output where the plan has no buffer of its own for it.
    const bool gathers = DescriptionOf(instruction.kind).collective == CollectiveKind::kAllGather;
    const std::int64_t in =
        gathers ? count(output) / plan_.communicators[group].size : count(instruction.src);
    WriteLaunch(names.c10d, from, to, *times.stream, times.stream->start_ns, times.stream->end_ns,
                fmt::format("{}(ncclDevKernelArgsStorage<4096ul>)", names.kernel),
                CollectiveArguments(names.called, instruction.communicator, in, count(output),
                                    plan_.buffers[static_cast<std::size_t>(output)].dtype));
  }

  Event CollectiveArguments(std::string_view called, CommunicatorId communicator, std::int64_t in,
                            std::int64_t out, DType dtype) const {
    const auto group = static_cast<std::size_t>(communicator);
    return {{"Collective name", called},
            {"In msg nelems", in},
            {"Out msg nelems", out},
            {"Group size", plan_.communicators[group].size},
            {"dtype", ScalarType(dtype)},
            {"In split size", "[]"},
            {"Out split size", "[]"},
            {"Process Group Name", std::to_string(group)},
            {"Process Group Description", plan_.communicators[group].name},
            {"Process Group Ranks", fmt::format("[{}]", fmt::join(ranks_[group], ", "))}};
  }

  void WriteOptimizer(const Instruction& instruction, const Times& times) {
    const Nanoseconds from = HostBegin(times);
    Tick();
    Tick();
    Nanoseconds to = Tick(times.host ? times.host->end_ns : Nanoseconds{});
    if (times.stream != nullptr) {
      WriteLaunch("aten::_optimizer_step", from + Nanoseconds{1}, to, *times.stream, times.stream->start_ns,
                  times.stream->end_ns, internal::InstructionText(plan_, instruction), Event::object());
      to = Tick();
    }
    Write(Complete("user_annotation",
                   fmt::format("Optimizer.step#{}.step", OptimizerName(plan_.strategy.optimizer.kind)),
                   thread_, from, to));
  }

  void WriteOrder(const Instruction& instruction, const Times& times) {
    const Nanoseconds from = HostBegin(times), to = Tick(times.host ? times.host->end_ns : Nanoseconds{});
    const OrderEffect order = DescriptionOf(instruction.kind).order;
    const std::string_view function = order == OrderEffect::kRecords ? "cudaEventRecord"
                                      : order == OrderEffect::kWaits ? "cudaStreamWaitEvent"
                                                                     : "cudaEventSynchronize";
    Event called = Complete("cuda_runtime", function, thread_, from, to);
    called["args"]["correlation"] = ++correlation_;
    Write(called);
  }

  // ---- segments ----
  struct Kernel {
    const OperatorEvent* event;
    Nanoseconds alone_ns;
    Nanoseconds issue_begin_ns, issue_end_ns;
    Nanoseconds begin_ns, end_ns;
  };

  // One behind the other, none before the host has issued it, each `ppm` of what it takes alone. Returns the
  // end of the last one.
  static Nanoseconds Place(std::vector<Kernel>& kernels, Nanoseconds begin, std::int64_t ppm) {
    Nanoseconds at = begin;
    for (Kernel& kernel : kernels) {
      kernel.begin_ns = std::max(at, kernel.issue_end_ns);
      at =
          kernel.begin_ns + Nanoseconds{static_cast<std::int64_t>(static_cast<double>(kernel.alone_ns.value) *
                                                                  static_cast<double>(ppm) * 1e-6)};
      kernel.end_ns = at;
    }
    return at;
  }

  // The span says when the segment began and ended. The slowdown of its kernels is spread evenly over them.
  static void Fit(std::vector<Kernel>& kernels, const Span& span) {
    std::int64_t low = 0, high = 1'000'000;
    while (Place(kernels, span.start_ns, high) < span.end_ns && high < std::int64_t{1} << 50) high *= 2;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (Place(kernels, span.start_ns, middle) < span.end_ns ? low : high) = middle;
    }
    Place(kernels, span.start_ns, high);
    for (Kernel& kernel : kernels) {
      kernel.end_ns = std::min(kernel.end_ns, span.end_ns);
      kernel.begin_ns = std::min(kernel.begin_ns, kernel.end_ns);
    }
    for (Kernel& kernel : kernels | std::views::reverse) {
      if (kernel.alone_ns.value == 0) continue;
      kernel.end_ns = span.end_ns;
      break;
    }
  }

  void WriteSegment(const Instruction& instruction, const Times& times) {
    const Segment& segment = plan_.segments[static_cast<std::size_t>(instruction.segment)];
    const bool in_engine =
        segment.phase == SegmentPhase::kBackward || segment.phase == SegmentPhase::kRecompute;
    const int thread_before = thread_;
    thread_ = in_engine ? kAutogradThread : kMainThread;
    const Nanoseconds issue_ns = cluster_.host.operator_issue_ns;
    const Nanoseconds from = HostBegin(times);
    Nanoseconds at = from;
    std::vector<Kernel> kernels;
    const Span* span = times.parts.empty() ? times.stream : nullptr;
    const auto flush = [&] {
      WriteKernels(kernels, span);
      kernels.clear();
    };
    for (std::int32_t e = 0; e < std::ssize(segment.entries); ++e) {
      const auto* event = std::get_if<OperatorEvent>(&segment.entries[static_cast<std::size_t>(e)]);
      if (event == nullptr) continue;
      const Nanoseconds next = at + std::max(issue_ns, kLaunchTicks);
      if (event->collective) {
        flush();
        WriteModelCollective(*event, at, next, times.PartAt(e, true));
      } else {
        if (kernels.empty() && !times.parts.empty()) span = times.PartAt(e, false);
        kernels.push_back({event, costs_->Operator(*event), at, next, {}, {}});
      }
      at = next;
      const bool ends =
          static_cast<std::size_t>(e) + 1 < segment.entries.size() &&
          std::holds_alternative<CollectiveWaitEvent>(segment.entries[static_cast<std::size_t>(e) + 1]);
      if (ends) flush();
    }
    flush();
    Tick(at);
    if (in_engine) {
      Write(
          Complete("cpu_op", "autograd::engine::evaluate_function: " + segment.name, thread_, from, Tick()));
    }
    thread_ = thread_before;
  }

  // `span`: when they ran on the device; null: they take no time.
  void WriteKernels(std::vector<Kernel>& kernels, const Span* span) {
    if (span != nullptr && !kernels.empty()) Fit(kernels, *span);
    for (const Kernel& kernel : kernels) {
      const std::string name = ProfiledName(kernel.event->name);
      const Nanoseconds begin = kernel.issue_begin_ns + Nanoseconds{1};
      if (span == nullptr || kernel.alone_ns.value == 0) {
        Write(Complete("cpu_op", name, thread_, begin, kernel.issue_end_ns));
      } else {
        WriteLaunch(name, begin, kernel.issue_end_ns, *span, kernel.begin_ns, kernel.end_ns,
                    kernel.event->name, Event::object());
      }
    }
  }

  // `span`: when it ran on its communicator's stream; null: in the kernel of another of its group.
  void WriteModelCollective(const OperatorEvent& op, Nanoseconds from, Nanoseconds to, const Span* span) {
    if (span == nullptr) return Write(Complete("cpu_op", ProfiledName(op.name), thread_, from, to));
    const ModelCollective& issued = *op.collective;
    const CollectiveNames names = NamesOf(issued.kind);
    const std::int64_t element = SizeBytes(op.dtype);
    WriteLaunch(ProfiledName(op.name), from + Nanoseconds{1}, to, *span, span->start_ns, span->end_ns,
                fmt::format("{}(ncclDevKernelArgsStorage<4096ul>)", names.kernel),
                CollectiveArguments(names.called, issued.communicator, op.bytes_read.value / element,
                                    op.bytes_written.value / element, op.dtype));
  }

  // ---- the step's end ----
  // The loop reads its loss: the host waits for the device.
  void WriteSynchronize() {
    const Nanoseconds from = Tick();
    if (from >= end_) {
      end_ = Tick();
      return;
    }
    Event called = Complete("cuda_runtime", "cudaDeviceSynchronize", kMainThread, from, end_);
    called["args"]["correlation"] = ++correlation_;
    Write(called);
  }

  void WriteMemory() {
    std::int64_t before = 0;
    for (const MemorySample& sample : simulation_.memory) {
      const std::int64_t total = sample.total_bytes.value;
      if (sample.step == step_ && total != before) {
        Write({{"ph", "i"},
               {"cat", "cpu_instant_event"},
               {"s", "t"},
               {"name", "[memory]"},
               {"pid", internal::kTraceProcess},
               {"tid", kMainThread},
               {"ts", internal::TraceMicroseconds(std::max(begin_, sample.time_ns))},
               {"args",
                {{"Total Reserved", simulation_.report.memory.reserved_bytes.value},
                 {"Total Allocated", total},
                 {"Bytes", total - before},
                 {"Addr", 0},
                 {"Device Id", kDevice},
                 {"Device Type", 1}}}});
      }
      before = total;
    }
  }

  struct OpenRange {
    std::string name;
    Nanoseconds begin_ns;
    int thread = kMainThread;
  };
  // The operator, and inside it the call that launches.
  static constexpr Nanoseconds kLaunchTicks{4};

  const Plan& plan_;
  const Simulation& simulation_;
  const Cluster& cluster_;
  const std::unique_ptr<CostModel> costs_;
  const std::int32_t step_;
  std::vector<std::vector<std::int64_t>> ranks_;  // by communicator
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<const Span*>> spans_;
  std::array<OpenRange, kLevels> open_;
  Nanoseconds begin_, end_, now_;
  std::int64_t correlation_ = 0;
  int thread_ = kMainThread;
  bool in_forward_ = false;
  bool first_ = true;
  std::string out_;
};

}  // namespace

std::string KinetoTrace(const Plan& plan, const Simulation& simulation, const Cluster& cluster) {
  return KinetoWriter(plan, simulation, cluster).Run();
}

}  // namespace shardplan
