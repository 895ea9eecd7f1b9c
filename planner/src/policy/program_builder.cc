// SPDX-License-Identifier: Apache-2.0
#include "shardplan/planner/program_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "shardplan/schemas/buffer_roles.h"
#include "units/partition.h"

namespace shardplan {
namespace {

constexpr std::string_view kOnDemand = ".on_demand";

// Buffers that a procedure finds as a step has left them, and the reverse.
bool IsStateOfUnit(const Buffer& buffer) {
  switch (LifetimeOf(buffer.role)) {
    case RoleLifetime::kUnsharded:
    case RoleLifetime::kAccumulated:
    case RoleLifetime::kOptimizer:
      return true;
    case RoleLifetime::kState:
      return IsOptimizerMemory(buffer.role) || buffer.persistent;
    case RoleLifetime::kScratch:
    case RoleLifetime::kBackward:
    case RoleLifetime::kPasses:
    case RoleLifetime::kPersistent:
      return buffer.persistent;
  }
  return buffer.persistent;
}

// The pass raised before the engine came to add it up.
bool IsNeverAccumulated(const Pass& pass, ParameterId parameter) {
  return pass.abandoned && std::ranges::none_of(pass.events, [&](const TraceEvent& event) {
           const auto* grad = std::get_if<ParameterGradEvent>(&event);
           return grad != nullptr && grad->parameter == parameter;
         });
}

}  // namespace

ProgramBuilder::ProgramBuilder(const Trace& trace, const Partition& partition, Plan& plan)
    : trace_(trace),
      partition_(partition),
      plan_(plan),
      has_operators_(HasOperators(trace.forwards) || HasOperators(trace.backwards)) {
  const auto count = [&](const std::vector<Pass>& passes, std::vector<std::vector<std::int32_t>>& done,
                         std::vector<std::int32_t>& lengths) {
    for (const Pass& pass : passes) {
      std::vector<std::int32_t>& before = done.emplace_back(1, 0);
      before.reserve(pass.events.size() + 1);
      for (const TraceEvent& event : pass.events) before.push_back(before.back() + (IsWork(event) ? 1 : 0));
      lengths.push_back(before.back());
    }
  };
  count(trace.forwards, done_in_forwards_, plan.passes.forwards);
  count(trace.backwards, done_in_backwards_, plan.passes.backwards);
}

bool ProgramBuilder::IsWork(const TraceEvent& event) const {
  if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
    return OwnerOf(partition_, grad->parameter, -1).unit >= 0;
  }
  if (const auto* enter = std::get_if<EnterEvent>(&event)) {
    if (has_operators_) return false;
    return std::ranges::any_of(trace_.modules[enter->module].parameters, [&](const NamedParameter& named) {
      return OwnerOf(partition_, named.parameter, enter->module).unit >= 0;
    });
  }
  return std::holds_alternative<OperatorEvent>(event) || std::holds_alternative<AllocateEvent>(event) ||
         std::holds_alternative<FreeEvent>(event) || std::holds_alternative<CollectiveWaitEvent>(event);
}

void ProgramBuilder::BeginStep(std::string name) {
  plan_.steps.push_back({.name = std::move(name)});
  passed_.clear();
}

void ProgramBuilder::BeginTrigger(TriggerKind kind, UnitId unit, std::int32_t microbatch) {
  if (plan_.steps.empty()) return Refuse("a trigger is issued outside of a step");
  const std::int32_t occurrence = passed_[{kind, unit, microbatch}]++;
  if (!plan_.steps.back().triggers.empty()) sharing_.Share(plan_.steps.back().triggers.back());
  plan_.steps.back().triggers.push_back(
      {.kind = kind, .unit = unit, .microbatch = microbatch, .occurrence = occurrence});
  unit_ = unit;
}

void ProgramBuilder::BeginProcedure(ProcedureKind kind, UnitId unit) {
  if (!plan_.procedures.empty()) plan_.procedures.back().instructions.Edit().shrink_to_fit();
  plan_.procedures.push_back({.kind = kind, .unit = unit});
  unit_ = unit;
  SetReason("on_demand");
}

void ProgramBuilder::SetReason(std::string_view reason) {
  const auto found = reasons_.find(reason);
  const SharedText known = found != reasons_.end() ? found->second : SharedText(reason);
  if (found == reasons_.end()) reasons_.emplace(reason, known);
  reason_ = known;
}

std::vector<Instruction>& ProgramBuilder::Instructions() {
  if (!plan_.procedures.empty()) return plan_.procedures.back().instructions.Edit();
  if (plan_.steps.empty() || plan_.steps.back().triggers.empty()) {
    Refuse("an instruction is issued outside of a trigger");
    return refused_;
  }
  return plan_.steps.back().triggers.back().instructions.Edit();
}

StreamId ProgramBuilder::Stream(std::string_view name, std::int32_t priority) {
  if (const auto found = streams_.find(name); found != streams_.end()) return found->second;
  const StreamId id = static_cast<StreamId>(plan_.streams.size());
  plan_.streams.push_back({std::string(name), priority});
  streams_.emplace(name, id);
  return id;
}

EventId ProgramBuilder::Event(const std::string& given) {
  const std::string name = plan_.procedures.empty() ? given : given + std::string(kOnDemand);
  const auto [entry, added] = events_.try_emplace(name, static_cast<EventId>(plan_.events.size()));
  if (added) plan_.events.push_back(name);
  return entry->second;
}

BufferId ProgramBuilder::AddBuffer(Buffer buffer) {
  // A buffer of another shape under a known name (a step in which fewer parameters get gradients) is another
  // buffer.
  if (!plan_.procedures.empty() && !IsStateOfUnit(buffer)) buffer.name += kOnDemand;
  const std::string name = buffer.name;
  for (int variant = 2;; ++variant) {
    const auto [entry, added] =
        buffers_.try_emplace(buffer.name, static_cast<BufferId>(plan_.buffers.size()));
    if (added) {
      plan_.buffers.push_back(std::move(buffer));
      return entry->second;
    }
    if (plan_.buffers[entry->second] == buffer) return entry->second;
    buffer.name = fmt::format("{}.{}", name, variant);
  }
}

BufferId ProgramBuilder::UnitBuffer(UnitId unit, BufferRole role, DType dtype, std::vector<Bytes> parts,
                                    std::vector<std::int32_t> parameters, std::string_view suffix,
                                    MemoryKind memory, CommunicatorId pool) {
  if (unit < 0 || unit >= std::ssize(plan_.units)) {
    Refuse(fmt::format("a buffer is made of unit {}, of {} that there are", unit, plan_.units.size()));
    return -1;
  }
  Buffer buffer{.role = role,
                .unit = unit,
                .dtype = dtype,
                .parts_bytes = std::move(parts),
                .parameters = std::move(parameters),
                .memory = memory,
                .persistent = role == BufferRole::kParamSharded,
                .pool = pool};
  buffer.name = fmt::format("{}.{}{}{}", DisplayName(plan_.units[unit].fqn), Name(role),
                            suffix.empty() ? "" : ".", suffix);
  return AddBuffer(std::move(buffer));
}

Instruction& ProgramBuilder::Emit(InstructionKind kind, StreamId stream) {
  if (stream < kHost || stream >= std::ssize(plan_.streams)) {
    Refuse(fmt::format("{} is issued on stream {}, which Stream() has not given", Name(kind), stream));
  }
  std::vector<Instruction>& instructions = Instructions();
  instructions.push_back({.kind = kind, .stream = stream, .unit = unit_, .reason = reason_});
  return instructions.back();
}

void ProgramBuilder::Refuse(std::string message) {
  if (status_) status_ = MakeError(ErrorCode::kBadInput, std::move(message));
}

void ProgramBuilder::CheckBuffer(BufferId buffer) {
  if (buffer >= 0 && buffer < std::ssize(plan_.buffers)) return;
  Refuse(fmt::format("buffer {} is used, which AddBuffer() has not given", buffer));
}

void ProgramBuilder::CheckEvent(EventId event) {
  if (event >= 0 && event < std::ssize(plan_.events)) return;
  Refuse(fmt::format("event {} is used, which Event() has not given", event));
}

void ProgramBuilder::Allocate(BufferId buffer, StreamId stream) {
  CheckBuffer(buffer);
  Emit(InstructionKind::kAllocate, stream).dst = buffer;
}

void ProgramBuilder::Free(BufferId buffer, StreamId stream, std::vector<StreamId> safe_after) {
  CheckBuffer(buffer);
  Instruction& free = Emit(InstructionKind::kFree, stream);
  free.src = buffer;
  free.safe_after = std::move(safe_after);
}

void ProgramBuilder::FreeParts(BufferId buffer, StreamId stream, std::vector<std::int32_t> parts) {
  CheckBuffer(buffer);
  if (parts.empty()) return Refuse("parts of a buffer are freed, and none is named");
  Instruction& free = Emit(InstructionKind::kFree, stream);
  free.src = buffer;
  free.parts = std::move(parts);
}

Instruction& ProgramBuilder::Move(InstructionKind kind, BufferId src, BufferId dst, StreamId stream) {
  CheckBuffer(src);
  CheckBuffer(dst);
  Instruction& move = Emit(kind, stream);
  move.src = src;
  move.dst = dst;
  return move;
}

void ProgramBuilder::Record(EventId event, StreamId stream) {
  CheckEvent(event);
  Emit(InstructionKind::kRecord, stream).event = event;
}

void ProgramBuilder::Wait(EventId event, StreamId stream) {
  CheckEvent(event);
  Emit(InstructionKind::kWait, stream).event = event;
}

void ProgramBuilder::HostWait(EventId event) {
  CheckEvent(event);
  Emit(InstructionKind::kHostWait, kHost).event = event;
}

void ProgramBuilder::WaitStream(StreamId waiter, StreamId on, const std::string& name) {
  if (waiter == on) return;
  const EventId event = Event(name);
  Record(event, on);
  Wait(event, waiter);
}

void ProgramBuilder::Compute(const HookPoint& event, const std::vector<ParameterId>& accumulating,
                             const std::vector<UnitId>& extra_reads) {
  if (event.kind != HookPointKind::kSegment)
    return Refuse("the model computes at a point that is no segment");
  SegmentKey key{.range = event.range};
  if (!has_operators_) key.extra_reads = extra_reads;
  if (!accumulating.empty()) {
    const Pass& pass = trace_.backwards[event.range.pass];
    for (std::int32_t i = event.range.begin; i < event.range.end; ++i) {
      const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
      if (grad == nullptr) continue;
      if (std::binary_search(accumulating.begin(), accumulating.end(), grad->parameter)) {
        key.accumulating.push_back(grad->parameter);
      }
    }
    std::sort(key.accumulating.begin(), key.accumulating.end());
  }
  auto found = segments_.find(key);
  if (found == segments_.end()) {
    Segment segment = MakeSegment(event, key);
    SegmentId id = -1;
    if (!segment.entries.empty() || !segment.reads.empty() || !segment.grads.empty()) {
      id = static_cast<SegmentId>(plan_.segments.size());
      const std::int32_t same_name = segment_names_[segment.name]++;
      if (same_name > 0) segment.name += fmt::format(" ({})", same_name + 1);
      plan_.segments.push_back(std::move(segment));
    }
    found = segments_.emplace(std::move(key), id).first;
  }
  if (found->second < 0) return;
  if (plan_.steps.empty() || plan_.steps.back().triggers.empty() || !plan_.procedures.empty()) {
    return Refuse("the model computes outside of a trigger");
  }
  Instruction& compute = Emit(InstructionKind::kCompute, kCompute);
  compute.segment = found->second;
  compute.microbatch_offset = event.microbatch - plan_.steps.back().triggers.back().microbatch;
  compute.unit = -1;
  compute.reason.clear();
}

SegmentId ProgramBuilder::AddSegment(Segment segment) {
  plan_.segments.push_back(std::move(segment));
  return static_cast<SegmentId>(plan_.segments.size()) - 1;
}

void ProgramBuilder::RunSegment(SegmentId segment) {
  Instruction& compute = Emit(InstructionKind::kCompute, kCompute);
  compute.segment = segment;
  compute.unit = -1;
}

OperatorEvent ProgramBuilder::OnPlansCommunicator(OperatorEvent op) const {
  if (op.collective)
    op.collective->communicator = partition_.model_communicators[op.collective->communicator];
  return op;
}

Segment ProgramBuilder::MakeSegment(const HookPoint& event, const SegmentKey& key) const {
  const EventRange& range = event.range;
  const Pass& pass = range.backward ? trace_.backwards[range.pass] : trace_.forwards[range.pass];
  const std::vector<std::int32_t>& done =
      (range.backward ? done_in_backwards_ : done_in_forwards_)[range.pass];
  Segment segment{.name = event.name,
                  .phase = event.phase,
                  .unit = event.unit,
                  .pass = range.pass,
                  .begin = done[range.begin],
                  .end = done[range.end],
                  .forward = event.forward};
  segment.entries.reserve(static_cast<std::size_t>(range.end - range.begin));
  std::set<UnitId> reads(key.extra_reads.begin(), key.extra_reads.end());
  const auto accumulates = [&](ParameterId parameter) {
    return std::binary_search(key.accumulating.begin(), key.accumulating.end(), parameter);
  };
  for (std::int32_t i = range.begin; i < range.end; ++i) {
    const TraceEvent& traced = pass.events[i];
    if (const auto* op = std::get_if<OperatorEvent>(&traced)) {
      for (const ParameterId parameter : op->parameters) {
        const UnitParameterRef owner = OwnerOf(partition_, parameter, op->module);
        if (owner.unit >= 0) reads.insert(owner.unit);
      }
      segment.entries.push_back(OnPlansCommunicator(*op));
    } else if (const auto* wait = std::get_if<CollectiveWaitEvent>(&traced)) {
      segment.entries.push_back(*wait);
    } else if (const auto* allocate = std::get_if<AllocateEvent>(&traced)) {
      AllocateEvent entry = *allocate;
      if (entry.role == StorageRole::kParameterGrad &&
          (accumulates(entry.parameter) || IsNeverAccumulated(pass, entry.parameter))) {
        entry.role = StorageRole::kBackwardTemp;
        entry.parameter = -1;
      }
      segment.entries.push_back(entry);
    } else if (const auto* free = std::get_if<FreeEvent>(&traced)) {
      segment.entries.push_back(*free);
    } else if (const auto* grad = std::get_if<ParameterGradEvent>(&traced)) {
      const UnitParameterRef owner = OwnerOf(partition_, grad->parameter, -1);
      if (owner.unit >= 0) segment.grads.push_back({owner.unit, owner.parameter});
      // The engine adds to the gradient that is there and drops the new one.
      if (accumulates(grad->parameter) && grad->storage >= 0) {
        segment.entries.push_back(FreeEvent{grad->storage});
      }
    } else if (const auto* enter = std::get_if<EnterEvent>(&traced); enter != nullptr && !has_operators_) {
      for (const NamedParameter& named : trace_.modules[enter->module].parameters) {
        const UnitParameterRef owner = OwnerOf(partition_, named.parameter, enter->module);
        if (owner.unit >= 0) reads.insert(owner.unit);
      }
    }
  }
  segment.reads.assign(reads.begin(), reads.end());
  return segment;
}

}  // namespace shardplan
