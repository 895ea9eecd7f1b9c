// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "replay/copy_resolver.h"
#include "replay/host_kernels.h"
#include "virtual/machine.h"
#include "virtual/marked_kernels.h"

namespace shardplan::executor {

VirtualRank::VirtualRank(VirtualMachineImpl& machine, const Plan& plan, std::int64_t rank)
    : machine_(machine),
      plan_(plan),
      rank_(rank),
      memory_(
          plan, machine.hand_out(), [&machine](std::uint64_t n) { return machine.Random(n); },
          machine.content()),
      names_(plan.buffers.size()),
      latest_record_(plan.events.size(), -1),
      issued_(plan.communicators.size(), 0) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (!plan.buffers[b].persistent) continue;
    std::shared_ptr<Instance> instance = memory_.Allocate(plan.buffers[b].parts_bytes, -1);
    instance->debts.clear();
    for (Block* block : instance->blocks) {
      if (block->data) std::fill_n(block->data.get(), block->bytes, std::byte{0});
      block->marks.Clear(0, static_cast<std::int64_t>(block->bytes));
    }
    SetMemory(static_cast<BufferId>(b), std::move(instance));
  }
}

void VirtualRank::SetMemory(BufferId buffer, std::shared_ptr<Instance> instance) {
  std::vector<Place> places;
  for (Block* block : instance->blocks) places.push_back({block, 0});
  names_[buffer] = {std::move(instance), PartsAt(std::move(places))};
}

VirtualRank::Parts VirtualRank::PartsAt(std::vector<Place> places) const {
  PartMemory memory;
  if (HasNumbers()) {
    for (const Place& place : places) memory.bytes.push_back(place.data());
  }
  memory.places = std::move(places);
  return std::make_shared<const PartMemory>(std::move(memory));
}

Status VirtualRank::Prepare(const Plan&) { return {}; }
Status VirtualRank::Prepare(const Plan& plan, std::int64_t rank) {
  for (const Communicator& communicator : plan.communicators) {
    groups_.push_back({GroupOf(communicator, rank).front(), RankInGroup(communicator, rank)});
  }
  return {};
}

Result<CopyId> VirtualRank::PrepareCopy(CopySpec spec) {
  copies_.push_back(std::make_unique<CopySpec>(std::move(spec)));
  return static_cast<CopyId>(copies_.size()) - 1;
}

Result<CollectiveId> VirtualRank::PrepareCollective(const CollectiveSpec& spec) {
  collectives_.push_back(spec);
  return static_cast<CollectiveId>(collectives_.size()) - 1;
}

std::span<std::byte> VirtualRank::Memory(BufferId buffer, std::int32_t part) {
  if (!names_[buffer].instance || !HasNumbers() || part >= std::ssize(names_[buffer].parts->bytes)) return {};
  return {names_[buffer].parts->bytes[part],
          static_cast<std::size_t>(plan_.buffers[buffer].parts_bytes[part].value)};
}

Place VirtualRank::PlaceOf(BufferId buffer, std::int32_t part) const {
  return names_[buffer].instance ? names_[buffer].parts->places[part] : Place{};
}

Result<VirtualRank::Parts> VirtualRank::Use(BufferId buffer, Debts& debts) {
  Name& name = names_[buffer];
  if (!name.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is used while it is not allocated", NameOf(buffer)));
  }
  memory_.TakeDebts(*name.instance, debts);
  return name.parts;
}

Debts VirtualRank::TakeDebts(StreamId stream, std::span<const BufferId> buffers) {
  Debts debts;
  ReleaseFinished();
  if (stream >= 0) memory_.AddDebts(stream, debts);
  for (const BufferId buffer : buffers) (void)Use(buffer, debts);
  return debts;
}

void VirtualRank::PushWork(StreamId stream, WorkLabel label, Debts debts, std::function<void()> work) {
  WorkItem item;
  item.label = label;
  item.debts = std::move(debts);
  item.work = std::move(work);
  machine_.Push(rank_, stream, std::move(item));
}

void VirtualRank::ReleaseFinished() {
  std::erase_if(pending_, [&](const PendingRelease& pending) {
    for (const std::int64_t record : pending.records) {
      if (!machine_.IsReached(record)) return false;
    }
    memory_.Release(*pending.instance);
    return true;
  });
}

Status VirtualRank::Allocate(BufferId buffer, StreamId stream) {
  Name& name = names_[buffer];
  if (name.instance) {
    return MakeError(ErrorCode::kBadInput, fmt::format("{} is allocated while it is alive", NameOf(buffer)));
  }
  ReleaseFinished();
  const bool on_device = plan_.buffers[buffer].memory == MemoryKind::kDevice;
  SetMemory(buffer, memory_.Allocate(plan_.buffers[buffer].parts_bytes, on_device ? stream : -1));
  return {};
}

Status VirtualRank::Free(BufferId buffer, std::span<const StreamId> safe_after) {
  Name& name = names_[buffer];
  if (!name.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is freed while it is not allocated", NameOf(buffer)));
  }
  std::shared_ptr<Instance> instance = std::exchange(name.instance, nullptr);
  name.parts = nullptr;
  if (instance.use_count() > 1) return {};  // an alias is left
  Release(buffer, std::move(instance), safe_after);
  return {};
}

Status VirtualRank::FreeParts(BufferId buffer, std::span<const std::int32_t> parts,
                              std::span<const StreamId> safe_after) {
  const std::shared_ptr<Instance>& instance = names_[buffer].instance;
  if (!instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("parts of {} are freed while it is not allocated", NameOf(buffer)));
  }
  for (const std::int32_t part : parts) {
    if (instance->blocks[static_cast<std::size_t>(part)] != nullptr) continue;
    return MakeError(ErrorCode::kBadInput, fmt::format("part {} of {} is freed twice", part, NameOf(buffer)));
  }
  Release(buffer, TakeParts(*instance, parts), safe_after);
  return {};
}

void VirtualRank::Release(BufferId buffer, std::shared_ptr<Instance> memory,
                          std::span<const StreamId> safe_after) {
  if (safe_after.empty()) return memory_.Release(*memory);
  PendingRelease pending = {std::move(memory), {}};
  for (const StreamId stream : safe_after) {
    if (machine_.IsIdle(rank_, stream)) continue;  // an event that is reached when it is recorded
    WorkItem item;
    item.kind = WorkItem::Kind::kRecord;
    item.record = machine_.NewRecord();
    item.label = {WorkLabel::Kind::kRelease, buffer};
    pending.records.push_back(item.record);
    machine_.Push(rank_, stream, std::move(item));
  }
  pending_.push_back(std::move(pending));
}

Status VirtualRank::MakeAlias(CopyId id) {
  const CopySpec& copy = *copies_[id];
  const Name& owner = names_[copy.src];
  Name& alias = names_[copy.dst];
  if (!owner.instance || alias.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} cannot become a name of {}", NameOf(copy.dst), NameOf(copy.src)));
  }
  std::vector<Place> places(plan_.buffers[copy.dst].parts_bytes.size());
  for (const CopyRun& run : copy.runs) {
    places[run.dst_part] = owner.parts->places[run.src_part];
    places[run.dst_part].offset += run.src_offset * SizeBytes(copy.src_dtype);
  }
  const bool holds_all =
      std::ranges::all_of(places, [](const Place& place) { return place.block != nullptr; });
  if (!holds_all) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} has parts that are not in {}", NameOf(copy.dst), NameOf(copy.src)));
  }
  alias = {owner.instance, PartsAt(std::move(places))};
  return {};
}

Status VirtualRank::PushRuns(WorkLabel::Kind kind, CopyId id, StreamId stream, RunsKernel kernel,
                             MarksKernel on_marks) {
  const CopySpec& copy = *copies_[id];
  Debts debts;
  Result<Parts> src = Use(copy.src, debts);
  if (!src) return std::unexpected(src.error());
  Result<Parts> dst = Use(copy.dst, debts);
  if (!dst) return std::unexpected(dst.error());
  WorkLabel label = {kind, copy.src, copy.dst};
  if (HasNumbers()) {
    PushWork(stream, label, std::move(debts), [&copy, kernel, src = *std::move(src), dst = *std::move(dst)] {
      kernel(copy, src->bytes, dst->bytes);
    });
  } else {
    PushWork(stream, label, std::move(debts),
             [&copy, on_marks, src = *std::move(src), dst = *std::move(dst)] {
               on_marks(copy, src->places, dst->places);
             });
  }
  return {};
}

Status VirtualRank::Copy(CopyId id, StreamId stream) {
  return PushRuns(WorkLabel::Kind::kCopy, id, stream, CopyOnHost, CopyMarks);
}

Status VirtualRank::Accumulate(CopyId id, StreamId stream) {
  return PushRuns(WorkLabel::Kind::kAccumulate, id, stream, AccumulateOnHost, AccumulateMarks);
}

Status VirtualRank::Scale(BufferId buffer, double divisor, StreamId stream) {
  Debts debts;
  Result<Parts> parts = Use(buffer, debts);
  if (!parts) return std::unexpected(parts.error());
  const Buffer& description = plan_.buffers[buffer];
  PushWork(stream, {WorkLabel::Kind::kScale, buffer}, std::move(debts),
           [&description, parts = *std::move(parts), divisor] {
             // Without numbers: what was poison stays it.
             for (std::size_t i = 0; i < parts->bytes.size(); ++i) {
               DivideOnHost(parts->bytes[i], PartNumel(description, static_cast<std::int32_t>(i)),
                            description.dtype, divisor);
             }
           });
  return {};
}

Status VirtualRank::NotRecorded(EventId event) const {
  return MakeError(ErrorCode::kInternal,
                   fmt::format("event {} is waited for before it is recorded", plan_.events[event]));
}

Status VirtualRank::Record(EventId event, StreamId stream) {
  WorkItem item;
  item.kind = WorkItem::Kind::kRecord;
  item.record = latest_record_[event] = machine_.NewRecord();
  item.label = {WorkLabel::Kind::kRecord, event};
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

Status VirtualRank::Wait(EventId event, StreamId stream) {
  if (latest_record_[event] < 0) return NotRecorded(event);
  WorkItem item;
  item.kind = WorkItem::Kind::kWait;
  item.record = latest_record_[event];
  item.label = {WorkLabel::Kind::kWait, event};
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

Result<bool> VirtualRank::HostWait(EventId event) {
  if (latest_record_[event] < 0) return std::unexpected(NotRecorded(event).error());
  return machine_.IsReached(latest_record_[event]);
}

Result<bool> VirtualRank::Synchronize() {
  if (Status status = machine_.Drain(); !status) return std::unexpected(std::move(status.error()));
  return true;
}

Status VirtualRank::PrepareSpans(std::int64_t spans) {
  spans_.assign(static_cast<std::size_t>(spans), {});
  return {};
}

// The thread that runs everything looks at the clock when the stream comes to it.
Status VirtualRank::BeginSpan(SpanId span, StreamId stream) {
  PushWork(stream, {WorkLabel::Kind::kSpan, span}, {},
           [this, span] { spans_[span].begin_ns = SteadyNanoseconds(); });
  return {};
}

Status VirtualRank::EndSpan(SpanId span, StreamId stream) {
  PushWork(stream, {WorkLabel::Kind::kSpan, span}, {},
           [this, span] { spans_[span].end_ns = SteadyNanoseconds(); });
  return {};
}

Result<SpanTimes> VirtualRank::TimesOf(SpanId span) {
  if (spans_[span].end_ns < 0) {
    if (Status status = machine_.Drain(); !status) return std::unexpected(std::move(status.error()));
  }
  return spans_[span];
}

Status VirtualRank::Check() {
  if (aborted_) return MakeError(ErrorCode::kEnvironment, *aborted_);
  return {};
}

Status VirtualRank::Issue(CollectiveId id, StreamId stream) {
  if (Status status = Check(); !status) return status;
  const CollectiveSpec& spec = collectives_[id];
  Debts debts;
  Result<Parts> src = Use(spec.src, debts);
  if (!src) return std::unexpected(src.error());
  Result<Parts> dst = Use(spec.dst, debts);
  if (!dst) return std::unexpected(dst.error());
  const Group& group = groups_[spec.communicator];
  const std::int64_t sequence = issued_[spec.communicator]++;
  Result<Rendezvous*> rendezvous = machine_.Join(spec, rank_, group.first_rank, group.position, sequence);
  if (!rendezvous) return std::unexpected(rendezvous.error());
  WorkItem item;
  item.kind = WorkItem::Kind::kCollective;
  item.label = {WorkLabel::Kind::kCollective, spec.communicator, spec.dst};
  item.rendezvous = *rendezvous;
  item.position = group.position;
  item.sequence = sequence;
  item.output = (*dst)->places[0];
  Place input = (*src)->places[0];
  input.offset += spec.src_offset * SizeBytes(spec.dtype);
  (*rendezvous)->inputs[item.position] = input;
  if (!debts.empty()) PushWork(stream, item.label, std::move(debts), {});
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

}  // namespace shardplan::executor
