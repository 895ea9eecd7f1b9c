// SPDX-License-Identifier: Apache-2.0
// Lowering: a plan's instructions become compact arrays with their costs looked up and their waits resolved.

#include <algorithm>
#include <concepts>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "cost/moved_bytes.h"
#include "cost/operator_costs.h"
#include "cost/optimizer_cost.h"
#include "engine/host_order.h"
#include "engine/model_streams.h"
#include "engine/owners.h"
#include "engine/segment_parts.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/engine.h"

namespace shardplan {
namespace {

constexpr std::size_t kMaxStreams = 100;
constexpr std::size_t kMaxUnits = 30'000;
constexpr std::size_t kMaxPhases = 60'000;
constexpr std::size_t kMaxLoads = 120;

std::unexpected<Error> Bad(std::string pointer, std::string message, std::string found) {
  return std::unexpected(
      Error{ErrorCode::kBadInput, std::move(message), "", std::move(pointer), std::move(found), ""});
}

class Lowering {
 public:
  Lowering(const Plan& plan, const Cluster& cluster, const CostModel& costs)
      : plan_(plan),
        cluster_(cluster),
        costs_(costs),
        operator_costs_(costs),
        copy_costs_(costs),
        optimizer_(plan),
        alive_(plan) {}

  // `first`: of the steps that are lowered.
  Result<EngineProgram> Run(std::size_t first) {
    if (plan_.streams.size() > kMaxStreams)
      return Bad("/streams", "too many streams", Text(plan_.streams.size()));
    if (plan_.world_size > kMaxRanks) return Bad("/world_size", "too many ranks", Text(plan_.world_size));
    if (plan_.units.size() > kMaxUnits) return Bad("/units", "too many units", Text(plan_.units.size()));
    model_communicators_ = internal::ModelCommunicators(plan_);
    if (plan_.streams.size() + model_communicators_.size() > kMaxStreams)
      return Bad("/streams", "too many streams with those of the model's collectives",
                 Text(plan_.streams.size() + model_communicators_.size()));
    program_.streams = static_cast<std::int32_t>(plan_.streams.size() + model_communicators_.size());
    program_.communicators = static_cast<std::int32_t>(plan_.communicators.size());
    placements_.resize(plan_.communicators.size());
    program_.units = static_cast<std::int32_t>(plan_.units.size());
    program_.host_runs_kernels = cluster_.host.runs_kernels;
    program_.compute_rate_ppm = cluster_.compute_rate_while_communicating_ppm;
    program_.communication_rate_ppm = cluster_.communication_rate_while_computing_ppm;
    // Slowed work takes so much longer; work that stands still meanwhile runs afterwards.
    constexpr std::int64_t kMillion = 1'000'000;
    const auto moving = [](std::int64_t rate_ppm) { return rate_ppm > 0 ? rate_ppm : kMillion; };
    const std::int64_t slowest_ppm =
        std::min(moving(program_.compute_rate_ppm), moving(program_.communication_rate_ppm));
    longest_ns_ = {kLongestStep.value / kMillion * slowest_ppm};
    if (Status lowered = LowerSegments(); !lowered) return std::unexpected(lowered.error());
    for (std::size_t s = 0; s < first; ++s) {
      for (const Trigger& trigger : plan_.steps[s].triggers) {
        for (const Instruction& instruction : trigger.instructions) alive_.Pass(instruction);
      }
    }
    for (std::size_t s = first; s < plan_.steps.size(); ++s) {
      if (Status lowered = LowerStep(s); !lowered) return std::unexpected(lowered.error());
    }
    return std::move(program_);
  }

 private:
  static std::string Text(std::integral auto n) { return std::to_string(n); }

  // Segments of an optimizer's step that `compute` runs: traced on sharded parameters, each operator of
  // theirs goes through DTensor. An owner's iterations take a plain matrix.
  void FindSharded() {
    sharded_.reserve(plan_.segments.size());
    for (const Segment& segment : plan_.segments)
      sharded_.push_back(segment.phase == SegmentPhase::kOptimizer);
    for (const auto& step : plan_.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& instruction : trigger.instructions) {
          if (instruction.kind == InstructionKind::kOrthogonalize)
            sharded_[static_cast<std::size_t>(instruction.segment)] = false;
        }
      }
    }
  }

  // An operator of the segment takes so much more to issue than one of the model.
  Nanoseconds BeyondModel(SegmentId segment) const {
    if (!sharded_[static_cast<std::size_t>(segment)]) return {};
    return std::max(Nanoseconds{0}, OptimizerIssue(cluster_.host) - cluster_.host.operator_issue_ns);
  }

  // The host's time to issue an operator; its kernels have it where the host runs them.
  Nanoseconds IssueOf(SegmentId segment) const {
    const bool in_kernels = cluster_.host.runs_kernels;
    return internal::IssueOfOperator(cluster_.host) + (in_kernels ? Nanoseconds{0} : BeyondModel(segment));
  }

  // lag(k) = max(issue of k, lag(k + 1) - duration of k), from the last operator to the first.
  void SetLags(const EngineSegment& run) {
    const std::int64_t issue_ns = IssueOf(run.of).value;
    EngineOperator* operators = program_.operators.data() + run.first;
    for (std::int32_t k = run.count - 1; k >= 0; --k) {
      const bool last = k == run.count - 1;
      operators[k].rest_ns = operators[k].duration_ns + (last ? Nanoseconds{0} : operators[k + 1].rest_ns);
      operators[k].lag_ns.value = issue_ns * (k + 1);
      if (!last)
        operators[k].lag_ns =
            std::max(operators[k].lag_ns, operators[k + 1].lag_ns - operators[k].duration_ns);
    }
  }

  // A segment that collectives of the model cut: its parts, and where its runs begin in
  // EngineProgram::segments.
  struct CutSegment {
    std::vector<internal::SegmentPart> parts;
    std::int32_t first_run = 0;
  };

  void Cut(std::int32_t s) {
    std::vector<internal::SegmentPart> parts = internal::PartsOf(At(plan_.segments, s));
    if (parts.empty()) return;
    const auto first_run = static_cast<std::int32_t>(program_.segments.size());
    EngineSegment run{program_.segments[static_cast<std::size_t>(s)].first, 0, s};
    const std::vector<SegmentEntry>& entries = At(plan_.segments, s).entries;
    for (const internal::SegmentPart& part : parts) {
      run.count = part.operators;
      if (run.count > 0) {
        SetLags(run);
        program_.segments.push_back(run);
      }
      // A collective has a place among the operators, too.
      const bool collective = run.count == 0 && std::holds_alternative<OperatorEvent>(
                                                    entries[static_cast<std::size_t>(part.entry)]);
      run.first += collective ? 1 : run.count;
    }
    cuts_.emplace(s, CutSegment{std::move(parts), first_run});
  }

  Status LowerSegments() {
    program_.segments.reserve(plan_.segments.size());
    program_.segment_flops.resize(plan_.segments.size());
    std::size_t entries = 0;
    for (const Segment& segment : plan_.segments) entries += segment.entries.size();
    program_.operators.reserve(entries);
    FindSharded();
    for (const Segment& segment : plan_.segments) {
      EngineSegment lowered{static_cast<std::int32_t>(program_.operators.size()), 0,
                            static_cast<std::int32_t>(program_.segments.size())};
      const Nanoseconds issue_ns = IssueOf(lowered.of);
      const Nanoseconds in_kernel_ns = cluster_.host.runs_kernels ? BeyondModel(lowered.of) : Nanoseconds{0};
      Nanoseconds in_all;
      for (const SegmentEntry& entry : segment.entries) {
        const auto* event = std::get_if<OperatorEvent>(&entry);
        if (event == nullptr) {
          const auto* born = std::get_if<AllocateEvent>(&entry);
          program_.recomputes |= born != nullptr && born->role == StorageRole::kRecompute;
          continue;
        }
        if (event->collective) {  // LowerModelCollective has its cost
          program_.operators.push_back({});
          ++lowered.count;
          continue;
        }
        const internal::OperatorFacts& facts = operator_costs_.Of(*event);
        if (facts.matmul_flops != 0) AddFlops(event->dtype, facts.matmul_flops);
        const bool measured = event->duration_ns.value >= 0;
        program_.operators.push_back(
            {facts.duration_ns + (measured ? Nanoseconds{0} : in_kernel_ns), {}, {}});
        ++(measured ? program_.measured_operators : program_.modelled_operators);
        ++lowered.count;
        in_all += program_.operators.back().duration_ns + issue_ns;
        if (in_all > longest_ns_) return TooLong("/segments/" + Text(program_.segments.size()));
      }
      SetLags(lowered);
      program_.segments.push_back(lowered);
    }
    for (std::int32_t s = 0; s < std::ssize(plan_.segments); ++s) Cut(s);
    operator_costs_.ForEachKind([&](const OperatorEvent& event, const internal::OperatorFacts& facts) {
      if (event.duration_ns.value >= 0 || facts.matmul_flops == 0) return;
      const std::vector<ComputeRate>& rates = cluster_.device.matmul;
      if (std::ranges::find(rates, event.dtype, &ComputeRate::dtype) == rates.end())
        program_.dtypes_without_rate.insert(std::string(Name(event.dtype)));
    });
    return {};
  }

  // To the segment that is lowered.
  void AddFlops(DType dtype, std::int64_t flops) {
    std::vector<SegmentFlops>& all = program_.segment_flops[program_.segments.size()];
    const auto known = std::ranges::find(all, dtype, &SegmentFlops::dtype);
    known == all.end() ? all.push_back({dtype, flops}) : static_cast<void>(known->flops += flops);
  }

  static std::unexpected<Error> TooLong(std::string pointer) {
    return Bad(std::move(pointer),
               "with the costs of this cluster a step takes longer than 2^53 ns (104 days)",
               "more than a report can say");
  }

  // Upper bound: all instructions serialised.
  Status CheckLength(const std::string& pointer) const {
    Nanoseconds in_all;
    for (const EngineInstruction& code : step_.code) {
      in_all += code.duration_ns + code.host_ns;
      if (code.op == EngineOp::kSegment) {
        const EngineSegment& segment = program_.segments[static_cast<std::size_t>(code.operand)];
        if (segment.count > 0) {
          in_all += program_.operators[static_cast<std::size_t>(segment.first)].rest_ns;
          in_all += code.host_ns * segment.count;
        }
      }
      if (in_all > longest_ns_) return TooLong(pointer);
    }
    return {};
  }

  Status LowerStep(std::size_t s) {
    step_ = {};
    const auto streams = static_cast<std::size_t>(program_.streams);
    step_.first_in_stream.assign(streams, -1);
    last_in_stream_.assign(streams, -1);
    last_unit_.assign(streams, -1);
    works_.clear();
    slot_of_event_.assign(plan_.events.size(), -1);
    unit_of_slot_.clear();
    issued_to_.assign(plan_.communicators.size(), 0);
    group_of_.clear();
    in_backward_ = false;
    engine_ended_ = false;
    EnterPhase(Phase::kForward);
    const PlanStep& step = plan_.steps[s];
    Reserve(step);
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const Trigger& trigger = step.triggers[t];
      const std::string pointer = "/steps/" + Text(s) + "/triggers/" + Text(t);
      EnterTrigger(trigger, static_cast<std::int32_t>(t));
      for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
        const InstructionOrigin origin{static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)};
        if (Status lowered = LowerInstruction(trigger.instructions[i], origin); !lowered) {
          Error error = lowered.error();
          if (error.pointer.empty()) error.pointer = pointer + "/instructions/" + Text(i);
          return std::unexpected(std::move(error));
        }
        ++step_.plan_instructions;
      }
    }
    if (step_.phases.size() > kMaxPhases)
      return Bad("/steps/" + Text(s), "too many passes", Text(step_.phases.size()));
    if (Status checked = CheckLength("/steps/" + Text(s)); !checked) return checked;
    step_.record_slots = static_cast<std::int32_t>(unit_of_slot_.size());
    ChooseRank();
    step_.queued_behind = internal::QueuedBehind(program_, step_, cluster_.host);
    program_.steps.push_back(std::move(step_));
    return {};
  }

  // The first rank with the most work of its own stands for all.
  void ChooseRank() {
    if (step_.owned.empty()) return;
    program_.groups = plan_.communicators;
    const std::vector<internal::OwnedWork> by_rank = internal::OwnedByRank(program_, step_);
    const auto most = std::ranges::max_element(by_rank, {}, &internal::OwnedWork::time_ns);
    program_.rank = static_cast<std::int32_t>(most - by_rank.begin());
  }

  void Reserve(const PlanStep& step) {
    std::size_t count = step.triggers.size();
    for (const Trigger& trigger : step.triggers) count += trigger.instructions.size();
    step_.code.reserve(count);
    step_.origins.reserve(count);
    step_.next_in_stream.reserve(count);
  }

  void EnterBackward() {
    in_backward_ = true;
    engine_ended_ = false;
    EnterPhase(Phase::kBackward);
  }

  void EnterPhase(Phase phase) {
    if (step_.phases.empty() || step_.phases.back() != phase) step_.phases.push_back(phase);
  }

  void EnterTrigger(const Trigger& trigger, std::int32_t index) {
    bool hook = true;
    switch (trigger.kind) {
      case TriggerKind::kPreForward:
      case TriggerKind::kPostForward:
        // A recomputation passes forward hooks inside the backward.
        if (!in_backward_) EnterPhase(Phase::kForward);
        break;
      case TriggerKind::kPreBackward:
      case TriggerKind::kPostBackward:
        EnterBackward();
        break;
      case TriggerKind::kBackwardEnd:
        EnterPhase(Phase::kBackward);
        in_backward_ = false;
        engine_ended_ = true;
        break;
      case TriggerKind::kOptimizerStep:
      case TriggerKind::kZeroGrad:
        hook = false;
        in_backward_ = false;
        EnterPhase(Phase::kOptimizer);
        break;
      default:
        hook = false;
    }
    EngineInstruction passed;
    passed.phase = static_cast<std::uint16_t>(step_.phases.size() - 1);
    if (hook) passed.host_ns = cluster_.host.trigger_ns;
    Append(passed, {index, -1});
  }

  void Append(const EngineInstruction& instruction, InstructionOrigin origin) {
    const auto index = static_cast<std::int32_t>(step_.code.size());
    step_.code.push_back(instruction);
    step_.origins.push_back(origin);
    step_.next_in_stream.push_back(-1);
    if (instruction.stream < 0) return;
    const auto stream = static_cast<std::size_t>(std::int32_t{instruction.stream});
    std::int32_t& last = last_in_stream_[stream];
    (last < 0 ? step_.first_in_stream[stream] : step_.next_in_stream[static_cast<std::size_t>(last)]) = index;
    last = index;
  }

  Status LowerInstruction(const Instruction& instruction, InstructionOrigin origin) {
    if (Status checked = CheckOperands(plan_, instruction); !checked) return checked;
    EngineInstruction lowered;
    lowered.unit = static_cast<std::int16_t>(instruction.unit);
    switch (DescriptionOf(instruction.kind).family) {
      case InstructionFamily::kCompute:
        LowerCompute(instruction, lowered);
        if (cuts_.contains(instruction.segment)) return LowerParts(instruction, lowered, origin);
        break;
      case InstructionFamily::kOrder:
        LowerOrder(instruction, lowered);
        break;
      case InstructionFamily::kCollective:
        if (Status done = LowerCollective(instruction, lowered); !done) return done;
        break;
      case InstructionFamily::kMemory:
        if (DescriptionOf(instruction.kind).lifetime == LifetimeEffect::kBegins) {
          lowered.host_ns = cluster_.host.allocate_ns *
                            static_cast<std::int64_t>(At(plan_.buffers, instruction.dst).parts_bytes.size());
        }
        break;
      case InstructionFamily::kOptimizer:
        if (instruction.kind == InstructionKind::kOrthogonalize) {
          LowerOrthogonalize(instruction, lowered);
        } else if (instruction.exchange >= 0) {
          LowerUpdate(instruction, lowered);
        } else if (IsWork(instruction.kind)) {
          LowerOptimizer(instruction, lowered);
        }
        break;
      case InstructionFamily::kCopy:
      case InstructionFamily::kScale:
        LowerCopy(instruction, lowered);
        break;
      case InstructionFamily::kBind:
        break;
    }
    lowered.phase = static_cast<std::uint16_t>(step_.phases.size() - 1);
    if (lowered.op == EngineOp::kWork && instruction.unit >= 0) {
      last_unit_[static_cast<std::size_t>(lowered.stream)] = instruction.unit;
    }
    Append(lowered, origin);
    alive_.Pass(instruction);
    return {};
  }

  template <typename T>
  static const T& At(const std::vector<T>& values, std::int32_t index) {
    return values[static_cast<std::size_t>(index)];
  }
  static bool In(std::int32_t index, std::size_t size) {
    return index >= 0 && static_cast<std::size_t>(index) < size;
  }

  void LowerOrder(const Instruction& instruction, EngineInstruction& lowered) {
    if (DescriptionOf(instruction.kind).order != OrderEffect::kRecords)
      return LowerWait(instruction, lowered);
    lowered.op = EngineOp::kRecord;
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.host_ns = cluster_.host.event_ns;
    lowered.operand = static_cast<std::int32_t>(unit_of_slot_.size());
    slot_of_event_[static_cast<std::size_t>(instruction.event)] = lowered.operand;
    unit_of_slot_.push_back(last_unit_[static_cast<std::size_t>(instruction.stream)]);
  }

  void LowerCompute(const Instruction& instruction, EngineInstruction& lowered) {
    const Segment& segment = At(plan_.segments, instruction.segment);
    switch (segment.phase) {
      case SegmentPhase::kForward:
      case SegmentPhase::kLoss:
        in_backward_ = false;
        EnterPhase(Phase::kForward);
        break;
      case SegmentPhase::kBackward:
        // A hook behind the engine's end in the same call belongs to the backward; the next hook need not.
        engine_ended_ ? EnterPhase(Phase::kBackward) : EnterBackward();
        break;
      case SegmentPhase::kRecompute:
        break;
      case SegmentPhase::kOptimizer:
        in_backward_ = false;
        EnterPhase(Phase::kOptimizer);
        break;
    }
    lowered.op = EngineOp::kSegment;
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.operand = instruction.segment;
    lowered.host_ns = IssueOf(instruction.segment);
    // The unit whose time it is: the one whose gradients it makes, else whose parameters it reads, else in
    // whose forward or backward it runs. The trigger before it may be another unit's.
    const UnitId whose = !segment.grads.empty()   ? segment.grads.front().unit
                         : !segment.reads.empty() ? segment.reads.front()
                                                  : segment.unit;
    if (whose >= 0)
      lowered.unit = In(whose, plan_.units.size()) ? static_cast<std::int16_t>(whose) : std::int16_t{-1};
  }

  // See trace.h, [Note: collectives of the model]. `whole`: the instruction as it is without them.
  Status LowerParts(const Instruction& instruction, EngineInstruction whole, InstructionOrigin origin) {
    whole.phase = static_cast<std::uint16_t>(step_.phases.size() - 1);
    const std::vector<SegmentEntry>& entries = At(plan_.segments, instruction.segment).entries;
    std::int32_t done = -1;  // record of the collective that was issued last
    const CutSegment& cut = cuts_.at(instruction.segment);
    whole.operand = cut.first_run;
    for (const internal::SegmentPart& part : cut.parts) {
      origin.entry = part.entry;
      if (part.operators > 0) {
        Append(whole, origin);
        ++whole.operand;
        continue;
      }
      const SegmentEntry& entry = entries[static_cast<std::size_t>(part.entry)];
      std::int32_t awaited = -1;
      if (const auto* wait = std::get_if<CollectiveWaitEvent>(&entry)) {
        const auto work = works_.find(wait->work);
        if (work != works_.end()) awaited = work->second;
      } else {
        const auto& op = std::get<OperatorEvent>(entry);
        if (!part.joined) {
          Result<std::int32_t> record = LowerModelCollective(op, part.size_bytes, whole, origin);
          if (!record) return std::unexpected(std::move(record.error()));
          done = *record;
        }
        (op.collective->work < 0 ? awaited : works_[op.collective->work]) = done;
      }
      if (awaited >= 0) Append(Order(EngineOp::kWait, whole.stream, awaited, whole), origin);
    }
    return {};
  }

  static EngineInstruction Order(EngineOp op, std::int8_t stream, std::int32_t slot,
                                 const EngineInstruction& of) {
    EngineInstruction order;
    order.op = op;
    order.stream = stream;
    order.operand = slot;
    order.phase = of.phase;
    return order;
  }

  std::int32_t AppendRecord(std::int8_t stream, const EngineInstruction& of, InstructionOrigin origin) {
    const auto slot = static_cast<std::int32_t>(unit_of_slot_.size());
    unit_of_slot_.push_back(-1);
    Append(Order(EngineOp::kRecord, stream, slot, of), origin);
    return slot;
  }

  // On its communicator's own stream, behind what the compute stream was given before. Returns the slot of
  // the record behind it.
  Result<std::int32_t> LowerModelCollective(const OperatorEvent& op, Bytes size,
                                            const EngineInstruction& whole, InstructionOrigin origin) {
    const ModelCollective& issued = *op.collective;
    const Communicator& communicator = At(plan_.communicators, issued.communicator);
    Result<std::span<const GroupPlacement>> placements = PlacementsOf(issued.communicator);
    if (!placements) return std::unexpected(placements.error());
    CollectiveRequest request{.kind = issued.kind, .ranks = communicator.size, .placements = *placements};
    request.full_tensor_bytes = size;
    request.busiest_ppm = issued.busiest_ppm;
    Result<const KnownCollective*> known = CostOf(request, issued.communicator);
    if (!known) return std::unexpected(known.error());
    const auto own = std::ranges::find(model_communicators_, issued.communicator);
    const auto stream =
        static_cast<std::int8_t>(std::ssize(plan_.streams) + (own - model_communicators_.begin()));
    Append(Order(EngineOp::kWait, stream, AppendRecord(whole.stream, whole, origin), whole), origin);
    EngineInstruction lowered;
    lowered.phase = whole.phase;
    lowered.unit = whole.unit;
    FillCollective(request, issued.communicator, **known, lowered);
    lowered.stream = stream;
    if (op.duration_ns.value >= 0) lowered.duration_ns = op.duration_ns;
    Append(lowered, origin);
    return AppendRecord(stream, whole, origin);
  }

  void LowerWait(const Instruction& instruction, EngineInstruction& lowered) {
    const bool host = DescriptionOf(instruction.kind).order == OrderEffect::kHostWaits;
    lowered.op = host ? EngineOp::kHostWait : EngineOp::kWait;
    if (!host) lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.host_ns = cluster_.host.event_ns;
    lowered.operand = slot_of_event_[static_cast<std::size_t>(instruction.event)];
    if (lowered.unit < 0 && lowered.operand >= 0) {
      lowered.unit = static_cast<std::int16_t>(unit_of_slot_[static_cast<std::size_t>(lowered.operand)]);
    }
  }

  Result<std::span<const GroupPlacement>> PlacementsOf(CommunicatorId id) {
    std::vector<GroupPlacement>& placements = placements_[static_cast<std::size_t>(id)];
    if (placements.empty()) {
      const Communicator& communicator = At(plan_.communicators, id);
      if (RanksSpanned(communicator) > kMaxRanks) {
        return Bad("/communicators/" + Text(id), "too many ranks", communicator.name);
      }
      placements = PlaceGroups(cluster_, communicator, plan_.world_size);
    }
    return placements;
  }

  Result<std::int8_t> LoadsIndex(const LinkLoads& loads) {
    const auto found = std::ranges::find(program_.loads, loads);
    const auto index = static_cast<std::size_t>(found - program_.loads.begin());
    if (found == program_.loads.end()) program_.loads.push_back(loads);
    if (index > kMaxLoads) return Bad("/communicators", "too many ways to use the links", Text(index + 1));
    return static_cast<std::int8_t>(index);
  }

  Status LowerCollective(const Instruction& instruction, EngineInstruction& lowered) {
    const Communicator& communicator = At(plan_.communicators, instruction.communicator);
    Result<std::span<const GroupPlacement>> placements = PlacementsOf(instruction.communicator);
    if (!placements) return std::unexpected(placements.error());
    const CollectiveKind kind = *DescriptionOf(instruction.kind).collective;
    CollectiveRequest request{.kind = kind, .ranks = communicator.size, .placements = *placements};
    request.full_tensor_bytes = SizeBytes(At(plan_.buffers, FullTensorOf(instruction)));
    if (kind == CollectiveKind::kAllToAll) {
      const ExchangeTraffic traffic = TrafficOf(plan_, instruction);
      request.full_tensor_bytes = traffic.size_bytes;
      request.busiest_ppm = traffic.busiest_ppm;
    }
    Result<const KnownCollective*> known = CostOf(request, instruction.communicator);
    if (!known) return std::unexpected(known.error());
    FillCollective(request, instruction.communicator, **known, lowered);
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    // Gloo copies what it scatters, and does not divide while it adds: the cpu backend divides the input
    // before.
    const std::int64_t copies =
        (kind == CollectiveKind::kReduceScatter ? 1 : 0) + (instruction.divisor != 1.0 ? 1 : 0);
    if (cluster_.host.runs_kernels && copies > 0) {
      const Bytes input = SizeBytes(At(plan_.buffers, instruction.src));
      lowered.host_ns += copy_costs_.Of(input, input) * copies;
    }
    return {};
  }

  // Layers repeat: the collectives of a communicator at one size are looked up once.
  struct KnownCollective {
    Nanoseconds duration_ns;
    std::int8_t loads = -1;
    std::int32_t source = -1;  // index into sources_
  };

  // All but its stream.
  void FillCollective(const CollectiveRequest& request, CommunicatorId communicator,
                      const KnownCollective& cost, EngineInstruction& lowered) {
    lowered.op = EngineOp::kWork;
    lowered.work = WorkClass::kCollective;
    lowered.loads = cost.loads;
    lowered.duration_ns = cost.duration_ns;
    lowered.host_ns = cluster_.host.collective_issue_ns;
    lowered.sequence = issued_to_[static_cast<std::size_t>(communicator)]++;
    lowered.operand = GroupIndex(request.kind, communicator, cost.source);
    CollectiveGroup& group = step_.groups[static_cast<std::size_t>(lowered.operand)];
    ++group.count;
    group.full_tensor_bytes += request.full_tensor_bytes;
  }

  Result<const KnownCollective*> CostOf(const CollectiveRequest& request, CommunicatorId communicator) {
    const auto [found, added] = known_collectives_.try_emplace(
        {communicator, request.kind, request.full_tensor_bytes.value, request.busiest_ppm});
    KnownCollective& known = found->second;
    if (!added) return &known;
    Result<CollectiveCost> cost = costs_.Collective(request);
    if (!cost) return std::unexpected(cost.error());
    Result<std::int8_t> loads = LoadsIndex(cost->loads);
    if (!loads) return std::unexpected(loads.error());
    const auto source = std::ranges::find(sources_, cost->source);
    known = {cost->duration_ns, *loads, static_cast<std::int32_t>(source - sources_.begin())};
    if (source == sources_.end()) sources_.push_back(std::move(cost->source));
    return &known;
  }

  std::int32_t GroupIndex(CollectiveKind kind, CommunicatorId communicator, std::int32_t source) {
    const auto [found, added] =
        group_of_.try_emplace({kind, communicator, source}, static_cast<std::int32_t>(step_.groups.size()));
    if (added) step_.groups.push_back({kind, communicator, At(sources_, source), 0, {}});
    return found->second;
  }

  // Work that the host computes itself belongs to its time for the instruction.
  void AddHostWork(Nanoseconds work_ns, EngineInstruction& lowered) {
    lowered.host_ns += work_ns;
    if (work_ns.value > 0) step_.host_work_of[static_cast<std::int32_t>(step_.code.size())] = work_ns;
    step_.host_work_ns = std::min(step_.host_work_ns + work_ns, kLongestStep);
  }

  // Shards in device memory are stepped on the stream. Shards in host memory, and all of a step without a
  // stream, are the host's work, done before the rest is issued.
  void LowerOptimizer(const Instruction& instruction, EngineInstruction& lowered) {
    const OptimizerWork work = optimizer_.Work(instruction.unit, instruction.parameter);
    const bool on_host_only = instruction.stream < 0;
    const OptimizerCost host = on_host_only ? work.on_host + work.on_device : work.on_host;
    const std::int64_t kernels = work.on_host.kernels + work.on_device.kernels;
    const Nanoseconds issue_ns = OptimizerIssue(cluster_.host) * kernels;
    const bool in_kernels = cluster_.host.runs_kernels && !on_host_only;
    if (!in_kernels) lowered.host_ns = issue_ns;
    AddHostWork(costs_.HostWork(host.read_bytes + host.written_bytes), lowered);
    if (on_host_only) return;
    lowered.op = EngineOp::kWork;
    lowered.work = WorkClass::kCompute;
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.duration_ns = copy_costs_.Of(work.on_device.read_bytes, work.on_device.written_bytes);
    if (in_kernels) lowered.duration_ns += issue_ns;
  }

  // By the owner alone; without owners by every rank.
  void LowerOrthogonalize(const Instruction& instruction, EngineInstruction& lowered) {
    LowerCompute(instruction, lowered);
    const Exchange& exchange = At(plan_.exchanges, instruction.exchange);
    const ExchangedMatrix& matrix = At(exchange.matrices, instruction.matrix);
    lowered.unit = static_cast<std::int16_t>(matrix.unit);
    if (HasOwners(exchange))
      step_.owned[static_cast<std::int32_t>(step_.code.size())] = {exchange.communicator, matrix.owner};
  }

  // Elementwise work on this rank's rows, local tensors, and copies from or to the pieces.
  void LowerUpdate(const Instruction& instruction, EngineInstruction& lowered) {
    const OptimizerCost cost = CostOfUpdate(plan_, instruction);
    lowered.op = EngineOp::kWork;
    lowered.work = WorkClass::kCompute;
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.duration_ns = copy_costs_.Of(cost.read_bytes, cost.written_bytes);
    const Nanoseconds issue_ns = cluster_.host.operator_issue_ns * cost.kernels;
    (cluster_.host.runs_kernels ? lowered.duration_ns : lowered.host_ns) += issue_ns;
  }

  void LowerCopy(const Instruction& instruction, EngineInstruction& lowered) {
    const bool on_host = instruction.stream < 0;
    const bool to_host = instruction.kind == InstructionKind::kCopyToHost;
    const bool to_device = instruction.kind == InstructionKind::kCopyToDevice;
    Nanoseconds work_ns;
    if (!alive_.MakesView(instruction)) {
      const CopiedBytes moved = MovedBy(plan_, instruction);
      lowered.host_ns = cluster_.host.copy_issue_ns;
      work_ns = to_host || to_device ? costs_.HostCopy(to_host ? moved.read : moved.written)
                : on_host            ? costs_.HostWork(moved.read + moved.written)
                                     : copy_costs_.Of(moved.read, moved.written);
    }
    if (on_host) return AddHostWork(work_ns, lowered);
    lowered.op = EngineOp::kWork;
    lowered.work = to_host ? WorkClass::kToHost : to_device ? WorkClass::kToDevice : WorkClass::kCopy;
    lowered.stream = static_cast<std::int8_t>(instruction.stream);
    lowered.duration_ns = work_ns;
  }

  const Plan& plan_;
  const Cluster& cluster_;
  const CostModel& costs_;
  std::vector<bool> sharded_;  // by segment
  internal::OperatorCosts operator_costs_;
  internal::CopyCosts copy_costs_;
  const OptimizerSteps optimizer_;
  EngineProgram program_;
  Nanoseconds longest_ns_;  // of everything in a step, one after the other
  EngineStep step_;
  std::vector<std::int32_t> last_in_stream_;
  std::vector<UnitId> last_unit_;  // by stream: of the work issued last
  std::vector<std::int32_t> slot_of_event_;
  std::vector<UnitId> unit_of_slot_;
  std::vector<std::vector<GroupPlacement>> placements_;  // by communicator; empty: not looked at yet
  std::vector<std::int32_t> issued_to_;                  // collectives, by communicator
  std::map<std::tuple<CommunicatorId, CollectiveKind, std::int64_t, std::int64_t>, KnownCollective>
      known_collectives_;
  std::vector<CommunicatorId> model_communicators_;  // in the order of their streams
  std::map<SegmentId, CutSegment> cuts_;
  std::map<std::int32_t, std::int32_t> works_;  // asynchronous ones that were issued last: slots of records
  std::vector<std::string> sources_;            // of costs: the different ones
  std::map<std::tuple<CollectiveKind, CommunicatorId, std::int32_t>, std::int32_t> group_of_;
  AliveBuffers alive_;
  bool in_backward_ = false;
  bool engine_ended_ = false;  // the engine has ended, and no hook of a backward was passed since
};

}  // namespace

Result<EngineProgram> LowerPlan(const Plan& plan, const Cluster& cluster, const CostModel& costs) {
  return Lowering(plan, cluster, costs).Run(0);
}

Result<EngineProgram> LowerLastStep(const Plan& plan, const Cluster& cluster, const CostModel& costs) {
  return Lowering(plan, cluster, costs).Run(plan.steps.empty() ? 0 : plan.steps.size() - 1);
}

}  // namespace shardplan
