#include <fmt/format.h>

#include "geometry.h"
#include "host_kernels.h"
#include "virtual_machine.h"

namespace shardplan::executor {

VirtualRank::VirtualRank(VirtualMachineImpl& machine, const Plan& plan, std::int64_t rank)
    : machine_(machine),
      plan_(plan),
      rank_(rank),
      memory_(plan.streams.size()),
      names_(plan.buffers.size()),
      latest_record_(plan.events.size(), -1),
      issued_(plan.communicators.size(), 0) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (!plan.buffers[b].persistent) continue;
    Name& name = names_[b];
    name.instance = memory_.Allocate(plan.buffers[b].parts_bytes, -1);
    name.instance->debts.clear();  // zero-filled
    for (Block* block : name.instance->blocks) name.parts.push_back(block->data.data());
  }
}

Status VirtualRank::Prepare(const Plan&) { return {}; }
Status VirtualRank::Prepare(const Plan&, std::int64_t) { return {}; }

Result<CopyId> VirtualRank::PrepareCopy(CopySpec spec) {
  copies_.push_back(std::make_unique<CopySpec>(std::move(spec)));
  return static_cast<CopyId>(copies_.size()) - 1;
}

Result<CollectiveId> VirtualRank::PrepareCollective(const CollectiveSpec& spec) {
  collectives_.push_back(spec);
  return static_cast<CollectiveId>(collectives_.size()) - 1;
}

std::span<std::byte> VirtualRank::Memory(BufferId buffer, std::int32_t part) {
  if (!names_[buffer].instance) return {};
  return {names_[buffer].parts[part],
          static_cast<std::size_t>(plan_.buffers[buffer].parts_bytes[part].value)};
}

Result<std::vector<std::byte*>> VirtualRank::Use(BufferId buffer, std::vector<Debt>& debts) {
  Name& name = names_[buffer];
  if (!name.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is used while it is not allocated", NameOf(buffer)));
  }
  const std::vector<Debt> taken = memory_.TakeDebts(*name.instance);
  debts.insert(debts.end(), taken.begin(), taken.end());
  return name.parts;
}

std::vector<Debt> VirtualRank::TakeDebts(StreamId stream, std::span<const BufferId> buffers) {
  std::vector<Debt> debts = memory_.TakeDebts(stream);
  for (const BufferId buffer : buffers) (void)Use(buffer, debts);
  return debts;
}

void VirtualRank::PushWork(StreamId stream, std::vector<Debt> debts, std::function<void()> work,
                           std::string what) {
  WorkItem item;
  item.what = std::move(what);
  item.work = [debts = std::move(debts), work = std::move(work)] {
    Poison(debts);
    work();
  };
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
  name.instance = memory_.Allocate(plan_.buffers[buffer].parts_bytes, stream);
  name.parts.clear();
  for (Block* block : name.instance->blocks) name.parts.push_back(block->data.data());
  return {};
}

Status VirtualRank::Free(BufferId buffer, std::span<const StreamId> safe_after) {
  Name& name = names_[buffer];
  if (!name.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is freed while it is not allocated", NameOf(buffer)));
  }
  std::shared_ptr<Instance> instance = std::exchange(name.instance, nullptr);
  name.parts.clear();
  if (instance.use_count() > 1) return {};  // an alias is left
  if (safe_after.empty()) {
    memory_.Release(*instance);
    return {};
  }
  PendingRelease pending = {std::move(instance), {}};
  for (const StreamId stream : safe_after) {
    WorkItem item;
    item.kind = WorkItem::Kind::kRecord;
    item.record = machine_.NewRecord();
    item.what = "the end of what was recorded on " + NameOf(buffer);
    pending.records.push_back(item.record);
    machine_.Push(rank_, stream, std::move(item));
  }
  pending_.push_back(std::move(pending));
  return {};
}

Status VirtualRank::MakeAlias(CopyId id) {
  const CopySpec& copy = *copies_[id];
  const Name& owner = names_[copy.src];
  Name& alias = names_[copy.dst];
  if (!owner.instance || alias.instance) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} cannot become a name of {}", NameOf(copy.dst), NameOf(copy.src)));
  }
  alias.instance = owner.instance;
  alias.parts.assign(plan_.buffers[copy.dst].parts_bytes.size(), nullptr);
  for (const CopyRun& run : copy.runs) {
    alias.parts[run.dst_part] = owner.parts[run.src_part] + run.src_offset * SizeBytes(copy.src_dtype);
  }
  return {};
}

Status VirtualRank::PushRuns(const CopySpec& copy, StreamId stream, RunsKernel kernel, std::string what) {
  std::vector<Debt> debts;
  Result<std::vector<std::byte*>> src = Use(copy.src, debts);
  if (!src) return std::unexpected(src.error());
  Result<std::vector<std::byte*>> dst = Use(copy.dst, debts);
  if (!dst) return std::unexpected(dst.error());
  PushWork(
      stream, std::move(debts), [&copy, kernel, src = *src, dst = *dst] { kernel(copy, src, dst); },
      std::move(what));
  return {};
}

Status VirtualRank::Copy(CopyId id, StreamId stream) {
  const CopySpec& copy = *copies_[id];
  return PushRuns(copy, stream, CopyOnHost,
                  fmt::format("the copy from {} to {}", NameOf(copy.src), NameOf(copy.dst)));
}

Status VirtualRank::Accumulate(CopyId id, StreamId stream) {
  const CopySpec& copy = *copies_[id];
  return PushRuns(copy, stream, AccumulateOnHost,
                  fmt::format("the accumulation of {} into {}", NameOf(copy.src), NameOf(copy.dst)));
}

Status VirtualRank::Scale(BufferId buffer, double divisor, StreamId stream) {
  std::vector<Debt> debts;
  Result<std::vector<std::byte*>> parts = Use(buffer, debts);
  if (!parts) return std::unexpected(parts.error());
  const Buffer& description = plan_.buffers[buffer];
  PushWork(
      stream, std::move(debts),
      [&description, parts = *parts, divisor] {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          DivideOnHost(parts[i], PartNumel(description, static_cast<std::int32_t>(i)), description.dtype,
                       divisor);
        }
      },
      fmt::format("the division of {}", NameOf(buffer)));
  return {};
}

Status VirtualRank::Record(EventId event, StreamId stream) {
  WorkItem item;
  item.kind = WorkItem::Kind::kRecord;
  item.record = latest_record_[event] = machine_.NewRecord();
  item.what = fmt::format("the record of event {}", plan_.events[event]);
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

Status VirtualRank::Wait(EventId event, StreamId stream) {
  if (latest_record_[event] < 0) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan_.events[event]));
  }
  WorkItem item;
  item.kind = WorkItem::Kind::kWait;
  item.record = latest_record_[event];
  item.what = fmt::format("the wait for event {}", plan_.events[event]);
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

Result<bool> VirtualRank::HostWait(EventId event) {
  if (latest_record_[event] < 0) {
    return MakeError(ErrorCode::kInternal,
                     fmt::format("event {} is waited for before it is recorded", plan_.events[event]));
  }
  return machine_.IsReached(latest_record_[event]);
}

Result<bool> VirtualRank::Synchronize() {
  if (Status status = machine_.Drain(); !status) return std::unexpected(std::move(status.error()));
  return true;
}

Status VirtualRank::Check() {
  if (aborted_) return MakeError(ErrorCode::kEnvironment, *aborted_);
  return {};
}

Status VirtualRank::Issue(CollectiveId id, StreamId stream) {
  if (Status status = Check(); !status) return status;
  const CollectiveSpec& spec = collectives_[id];
  const Communicator& group = plan_.communicators[spec.communicator];
  std::vector<Debt> debts;
  Result<std::vector<std::byte*>> src = Use(spec.src, debts);
  if (!src) return std::unexpected(src.error());
  Result<std::vector<std::byte*>> dst = Use(spec.dst, debts);
  if (!dst) return std::unexpected(dst.error());
  const std::int64_t sequence = issued_[spec.communicator]++;
  Result<Rendezvous*> rendezvous = machine_.Join(spec, rank_, sequence);
  if (!rendezvous) return std::unexpected(rendezvous.error());
  const std::string what =
      fmt::format("collective {} on communicator {}, into {}", sequence, group.name, NameOf(spec.dst));
  PushWork(
      stream, std::move(debts), [] {}, what);
  WorkItem item;
  item.kind = WorkItem::Kind::kCollective;
  item.rendezvous = *rendezvous;
  item.position = RankInGroup(group, rank_);
  item.sequence = sequence;
  item.communicator = spec.communicator;
  item.output = (*dst)[0];
  item.what = what;
  (*rendezvous)->inputs[item.position] = (*src)[0] + spec.src_offset * SizeBytes(spec.dtype);
  machine_.Push(rank_, stream, std::move(item));
  return {};
}

}  // namespace shardplan::executor
