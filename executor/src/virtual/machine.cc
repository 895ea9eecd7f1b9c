// SPDX-License-Identifier: Apache-2.0
#include "virtual/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "replay/host_kernels.h"
#include "shardplan/schemas/assert.h"
#include "virtual/marked_kernels.h"

namespace shardplan::executor {

std::unique_ptr<VirtualMachine> VirtualMachine::Create(const Plan& plan, std::uint64_t seed,
                                                       VirtualContent content) {
  return std::make_unique<VirtualMachineImpl>(plan, seed, content);
}

VirtualMachineImpl::VirtualMachineImpl(const Plan& plan, std::uint64_t seed, VirtualContent content)
    : plan_(plan),
      content_(content),
      random_(seed),
      queues_(plan.streams.size() * static_cast<std::size_t>(plan.world_size)),
      order_(queues_.size()),
      in_order_(random_() % 2 == 0),
      hand_out_(static_cast<HandOut>(Random(4))),
      longest_shuffle_(Random(2) == 0 ? 100 : 2000),
      has_outsider_(Random(2) == 0),
      collectives_done_(plan.communicators.size() * static_cast<std::size_t>(plan.world_size)) {
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    ranks_.push_back(std::make_unique<VirtualRank>(*this, plan, rank));
  }
}

VirtualMachineImpl::~VirtualMachineImpl() = default;

Device& VirtualMachineImpl::device(std::int64_t rank) { return *ranks_[rank]; }
Collectives& VirtualMachineImpl::collectives(std::int64_t rank) { return *ranks_[rank]; }

std::span<std::byte> VirtualMachineImpl::Memory(std::int64_t rank, BufferId buffer, std::int32_t part) {
  return ranks_[rank]->Memory(buffer, part);
}

Place VirtualMachineImpl::PlaceOf(std::int64_t rank, BufferId buffer, std::int32_t part) {
  return ranks_[rank]->PlaceOf(buffer, part);
}

void VirtualMachineImpl::Enqueue(std::int64_t rank, StreamId stream, std::span<const BufferId> uses,
                                 std::function<void()> work) {
  WorkItem item;
  item.debts = ranks_[rank]->TakeDebts(stream, uses);
  item.work = [borrowed = ranks_[rank]->Borrow(stream), work = std::move(work)] {
    if (borrowed != nullptr) Poison(*borrowed);
    work();
  };
  Push(rank, stream, std::move(item));
}

void VirtualMachineImpl::Push(std::int64_t rank, StreamId stream, WorkItem item) {
  if (stream < 0) {
    Poison(item.debts);
    if (item.work) item.work();
    return;
  }
  const std::size_t index =
      static_cast<std::size_t>(rank) * plan_.streams.size() + static_cast<std::size_t>(stream);
  queues_[index].push_back(std::move(item));
  Arrive(index);
}

bool VirtualMachineImpl::IsIdle(std::int64_t rank, StreamId stream) const {
  return queues_[static_cast<std::size_t>(rank) * plan_.streams.size() + static_cast<std::size_t>(stream)]
      .empty();
}

std::int64_t VirtualMachineImpl::NewRecord() {
  reached_.push_back(false);
  return std::ssize(reached_) - 1;
}

namespace {

// The stretches that a member reads, in elements of its input.
std::vector<SentElements> InputOf(const Rendezvous& rendezvous, std::int64_t position) {
  const CollectiveSpec& spec = *rendezvous.specs[position];
  if (spec.kind == CollectiveKind::kAllToAll) return spec.sends;
  const bool scatters = spec.kind == CollectiveKind::kReduceScatter;
  return {{0, spec.slot_numel * (scatters ? rendezvous.members : 1)}};
}

// The parts that a member of an all_to_all gets, one from each member, in elements of what was read.
std::vector<SentElements> ReceivedBy(const Rendezvous& rendezvous, std::int64_t position) {
  std::vector<SentElements> parts;
  std::int64_t first = 0;
  for (const CollectiveSpec* spec : rendezvous.specs) {
    for (std::int64_t to = 0; to < rendezvous.members; ++to) {
      if (to == position) parts.push_back({first, spec->sends[to].numel});
      first += spec->sends[to].numel;
    }
  }
  return parts;
}

// A member that sends another one more or less than that one waits for; -1: none that has joined.
std::int64_t Disagreeing(const Rendezvous& rendezvous, const CollectiveSpec& spec, std::int64_t position) {
  if (spec.kind != CollectiveKind::kAllToAll) return -1;
  for (std::int64_t m = 0; m < rendezvous.members; ++m) {
    const CollectiveSpec* other = rendezvous.specs[m];
    if (other != nullptr && (other->sends[position].numel != spec.receive_numel[m] ||
                             other->receive_numel[position] != spec.sends[m].numel))
      return m;
  }
  return -1;
}

}  // namespace

Result<Rendezvous*> VirtualMachineImpl::Join(const CollectiveSpec& spec, std::int64_t rank,
                                             std::int64_t first_rank, std::int64_t position,
                                             std::int64_t sequence) {
  const Communicator& group = plan_.communicators[spec.communicator];
  auto [entry, added] = rendezvous_.try_emplace({spec.communicator, first_rank, sequence});
  Rendezvous& rendezvous = entry->second;
  if (added) {
    rendezvous.key = entry->first;
    rendezvous.spec = &spec;
    rendezvous.members = group.size;
    rendezvous.inputs.resize(static_cast<std::size_t>(group.size));
    rendezvous.specs.resize(static_cast<std::size_t>(group.size));
    rendezvous.specs[position] = &spec;
    return &rendezvous;
  }
  const CollectiveSpec& other = *rendezvous.spec;
  const std::int64_t disagrees = other.kind == spec.kind ? Disagreeing(rendezvous, spec, position) : -1;
  if (other.kind == spec.kind && other.slot_numel == spec.slot_numel && other.dtype == spec.dtype &&
      other.reduce_op == spec.reduce_op && other.divisor == spec.divisor && other.src == spec.src &&
      other.dst == spec.dst && disagrees < 0) {
    rendezvous.specs[position] = &spec;
    return &rendezvous;
  }
  const auto text = [&](const CollectiveSpec& s) {
    return fmt::format("{} elements of {} to {}", s.slot_numel, plan_.buffers[s.src].name,
                       plan_.buffers[s.dst].name);
  };
  Error error = {
      ErrorCode::kNegative,
      fmt::format("collective {} on communicator {}: ranks issue different ones", sequence, group.name),
      {},
      {},
      {},
      {}};
  if (disagrees >= 0) {
    const CollectiveSpec& peer = *rendezvous.specs[disagrees];
    error.found = fmt::format("rank {}: {} elements to and {} from position {} of the group", rank,
                              spec.sends[disagrees].numel, spec.receive_numel[disagrees], disagrees);
    error.expected = fmt::format("{} and {}", peer.receive_numel[position], peer.sends[position].numel);
    return std::unexpected(std::move(error));
  }
  error.found = fmt::format("rank {}: {}", rank, text(spec));
  error.expected = text(other);
  return std::unexpected(std::move(error));
}

bool VirtualMachineImpl::CanRun(std::size_t index) const {
  if (queues_[index].empty()) return false;
  const WorkItem& item = queues_[index].front();
  switch (item.kind) {
    case WorkItem::Kind::kWork:
    case WorkItem::Kind::kRecord:
      return true;
    case WorkItem::Kind::kWait:
      return reached_[item.record];
    case WorkItem::Kind::kCollective:
      return item.rendezvous->arrived == item.rendezvous->members;
  }
  return false;
}

// A collective arrives as soon as its stream has come to it (and the one before it on the communicator is
// done), whatever the preferences: arriving is not running.
void VirtualMachineImpl::Arrive(std::size_t index) {
  if (queues_[index].empty()) return;
  WorkItem& item = queues_[index].front();
  if (item.kind != WorkItem::Kind::kCollective || item.arrived) return;
  const std::int64_t done = CollectivesDone(index / plan_.streams.size(), item.label.a);
  if (in_order_ && item.sequence != done) return;
  item.arrived = true;
  ++item.rendezvous->arrived;
  SHARDPLAN_ASSERT(item.rendezvous->arrived <= item.rendezvous->members, "a member arrives once");
}

void VirtualMachineImpl::Run(std::size_t index) {
  SHARDPLAN_ASSERT(!queues_[index].empty(), "CanRun finds something at the head");
  WorkItem& item = queues_[index].front();
  if (item.kind == WorkItem::Kind::kCollective) {
    // The first member to run reads all inputs; outputs are written later, each when its own stream's turn
    // comes.
    if (!item.rendezvous->read) return ReadInputs(*item.rendezvous);
    return EndCollective(index);
  }
  if (item.kind == WorkItem::Kind::kRecord) reached_[item.record] = true;
  Poison(item.debts);
  if (item.work) item.work();
  queues_[index].pop_front();
  Arrive(index);
}

void VirtualMachineImpl::EndCollective(std::size_t index) {
  const WorkItem& item = queues_[index].front();
  WriteOutput(item);
  const std::size_t rank = index / plan_.streams.size();
  ++CollectivesDone(rank, item.label.a);
  queues_[index].pop_front();
  for (std::size_t s = 0; s < plan_.streams.size(); ++s) Arrive(rank * plan_.streams.size() + s);
}

void VirtualMachineImpl::ReadInputs(Rendezvous& rendezvous) {
  const CollectiveSpec& spec = *rendezvous.spec;
  std::int64_t read = 0;
  for (std::int64_t m = 0; m < rendezvous.members; ++m) {
    const Place& input = rendezvous.inputs[m];
    for (const SentElements& part : InputOf(rendezvous, m)) {
      const std::int64_t first = part.first * SizeBytes(spec.dtype);
      const std::int64_t bytes = part.numel * SizeBytes(spec.dtype);
      if (content_ == VirtualContent::kMarks) {
        AddMarks(input.block->marks, input.offset + first, bytes, rendezvous.gathered_marks, read);
      } else {
        rendezvous.gathered.insert(rendezvous.gathered.end(), input.data() + first,
                                   input.data() + first + bytes);
      }
      read += bytes;
    }
  }
  rendezvous.read = true;
}

void VirtualMachineImpl::WriteOutput(const WorkItem& item) {
  Rendezvous& rendezvous = *item.rendezvous;
  const CollectiveSpec& spec = *rendezvous.spec;
  SHARDPLAN_ASSERT(rendezvous.read && rendezvous.finished < rendezvous.members,
                   "all inputs are read before an output is written, and each member writes once");
  if (content_ == VirtualContent::kMarks) {
    WriteMarks(item);
  } else if (spec.kind == CollectiveKind::kAllToAll) {
    std::byte* to = item.output.data();
    for (const SentElements& part : ReceivedBy(rendezvous, item.position)) {
      const std::int64_t bytes = part.numel * SizeBytes(spec.dtype);
      std::copy_n(rendezvous.gathered.data() + part.first * SizeBytes(spec.dtype), bytes, to);
      to += bytes;
    }
  } else if (spec.kind == CollectiveKind::kAllGather) {
    std::memcpy(item.output.data(), rendezvous.gathered.data(), rendezvous.gathered.size());
  } else {
    const bool scatter = spec.kind == CollectiveKind::kReduceScatter;
    const std::int64_t input_numel = spec.slot_numel * (scatter ? rendezvous.members : 1);
    const std::int64_t first = scatter ? item.position * spec.slot_numel : 0;
    const double divisor =
        spec.reduce_op == ReduceOp::kAverage ? static_cast<double>(rendezvous.members) : spec.divisor;
    ReduceOnHost(rendezvous.gathered.data() + first * SizeBytes(spec.dtype), rendezvous.members, input_numel,
                 item.output.data(), spec.slot_numel, spec.dtype, divisor);
  }
  if (++rendezvous.finished == rendezvous.members) rendezvous_.erase(RendezvousKey(rendezvous.key));
}

// The sum of a reduction is poison where any member's is.
void VirtualMachineImpl::WriteMarks(const WorkItem& item) {
  const Rendezvous& rendezvous = *item.rendezvous;
  const CollectiveSpec& spec = *rendezvous.spec;
  const std::int64_t slot = spec.slot_numel * SizeBytes(spec.dtype);
  PoisonMarks& marks = item.output.block->marks;
  if (spec.kind == CollectiveKind::kAllToAll) {
    std::int64_t to = item.output.offset;
    for (const SentElements& part : ReceivedBy(rendezvous, item.position)) {
      const std::int64_t bytes = part.numel * SizeBytes(spec.dtype);
      marks.Clear(to, to + bytes);
      AddMarks(rendezvous.gathered_marks, part.first * SizeBytes(spec.dtype), bytes, marks, to);
      to += bytes;
    }
    return;
  }
  const bool gathers = spec.kind == CollectiveKind::kAllGather;
  marks.Clear(item.output.offset, item.output.offset + (gathers ? slot * rendezvous.members : slot));
  const bool scatter = spec.kind == CollectiveKind::kReduceScatter;
  for (std::int64_t m = 0; m < rendezvous.members; ++m) {
    const std::int64_t from = scatter ? (m * rendezvous.members + item.position) * slot : m * slot;
    AddMarks(rendezvous.gathered_marks, from, slot, marks, item.output.offset + (gathers ? m * slot : 0));
  }
}

// New preferences, for a while.
void VirtualMachineImpl::Shuffle() {
  for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[Random(i)]);
  until_shuffle_ = static_cast<std::int64_t>(1 + Random(1 + Random(longest_shuffle_)));
  if (!has_outsider_) return;
  const std::size_t streams = plan_.streams.size();
  const std::size_t outsider = Random(streams);
  const bool first = Random(3) == 0;
  std::ranges::stable_partition(order_,
                                [&](std::size_t queue) { return (queue % streams == outsider) == first; });
}

Result<bool> VirtualMachineImpl::RunOne() {
  if (until_shuffle_-- <= 0) Shuffle();
  for (const std::size_t index : order_) {
    if (!CanRun(index)) continue;
    Run(index);
    return true;
  }
  return false;
}

std::string VirtualMachineImpl::Text(const WorkItem& item) const {
  const auto buffer = [&](std::int32_t id) { return plan_.buffers[id].name; };
  const WorkLabel& label = item.label;
  switch (label.kind) {
    case WorkLabel::Kind::kModel:
      return "the model's work";
    case WorkLabel::Kind::kCopy:
      return fmt::format("the copy from {} to {}", buffer(label.a), buffer(label.b));
    case WorkLabel::Kind::kAccumulate:
      return fmt::format("the accumulation of {} into {}", buffer(label.a), buffer(label.b));
    case WorkLabel::Kind::kScale:
      return fmt::format("the division of {}", buffer(label.a));
    case WorkLabel::Kind::kRecord:
      return fmt::format("the record of event {}", plan_.events[label.a]);
    case WorkLabel::Kind::kRelease:
      return fmt::format("the end of what was recorded on {}", buffer(label.a));
    case WorkLabel::Kind::kWait:
      return fmt::format("the wait for event {}", plan_.events[label.a]);
    case WorkLabel::Kind::kSpan:
      return fmt::format("a clock of span {}", label.a);
    case WorkLabel::Kind::kCollective:
      return fmt::format("collective {} on communicator {}, into {}", item.sequence,
                         plan_.communicators[label.a].name, buffer(label.b));
  }
  return {};
}

Status VirtualMachineImpl::Drain() {
  while (true) {
    Result<bool> ran = RunOne();
    if (!ran) return std::unexpected(std::move(ran.error()));
    if (!*ran) break;
  }
  // Waits follow from something else that is stuck: a collective that a rank does not take part in, if there
  // is one.
  std::size_t stuck = queues_.size();
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    if (queues_[i].empty()) continue;
    if (stuck == queues_.size()) stuck = i;
    if (queues_[i].front().kind != WorkItem::Kind::kCollective) continue;
    stuck = i;
    break;
  }
  if (stuck == queues_.size()) return {};
  return MakeError(
      ErrorCode::kNegative,
      fmt::format("deadlock: rank {}, stream {}: {} can never run", stuck / plan_.streams.size(),
                  plan_.streams[stuck % plan_.streams.size()].name, Text(queues_[stuck].front())));
}

}  // namespace shardplan::executor
