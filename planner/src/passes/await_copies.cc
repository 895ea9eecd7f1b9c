// SPDX-License-Identifier: Apache-2.0
#include "passes/await_copies.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace {

using Clock = std::vector<std::int64_t>;  // by stream: how much of its work is done

void JoinClocks(Clock& into, const Clock& from) {
  for (std::size_t s = 0; s < into.size(); ++s) into[s] = std::max(into[s], from[s]);
}

// Copies of a buffer in host memory, by stream: how far the stream has to get until its copies are done.
struct CopiesOf {
  Clock from;  // that read it
  Clock to;    // that write it
};

// Follows the program in host order: what is done when the host issues the next instruction.
class CopyWaits {
 public:
  explicit CopyWaits(Plan& plan)
      : plan_(plan),
        shards_(plan.units.size()),
        gradients_(plan.units.size()),
        event_of_(plan.streams.size(), -1) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      if (!IsOnHost(buffer) || buffer.unit < 0 || !Trains(plan.units[buffer.unit])) continue;
      const auto id = static_cast<BufferId>(b);
      if (buffer.role == BufferRole::kParamSharded) shards_[buffer.unit].push_back(id);
      if (buffer.role == BufferRole::kGradHost) gradients_[buffer.unit].push_back(id);
    }
    Forget();
  }

  bool HasHostMemory() const { return std::ranges::any_of(plan_.buffers, IsOnHost); }

  // Nothing is under way.
  void Forget() {
    const Clock zero(plan_.streams.size(), 0);
    issued_ = host_ = zero;
    streams_.assign(plan_.streams.size(), zero);
    events_.assign(plan_.events.size(), zero);
    copies_.assign(plan_.buffers.size(), {zero, zero});
  }

  // Puts the waits in that the list lacks, and goes on behind it. `steps`: an optimizer's step begins with
  // it.
  bool Follow(InstructionList& list, bool steps) {
    std::vector<std::pair<std::size_t, StreamId>>
        missing;  // before which instruction, which stream is waited for
    const auto await = [&](std::size_t at, const Clock& needed) {
      for (const StreamId stream : StreamsToWaitFor(needed)) {
        missing.emplace_back(at, stream);
        JoinClocks(host_, streams_[stream]);
      }
    };
    for (std::size_t n = 0; n < list.size(); ++n) {
      // A step begins behind the waits that the list has in front.
      if (steps && !RecordsOrHostWaits(list[n])) {
        await(n, NeededByStep(-1));
        steps = false;
      }
      await(n, Needed(list[n]));
      Issue(list[n]);
    }
    if (steps) await(list.size(), NeededByStep(-1));
    if (missing.empty()) return false;
    list = WithWaits(list, missing);
    return true;
  }

 private:
  static bool RecordsOrHostWaits(const Instruction& i) {
    const OrderEffect order = DescriptionOf(i.kind).order;
    return order == OrderEffect::kRecords || order == OrderEffect::kHostWaits;
  }
  static bool Trains(const Unit& unit) {
    return std::ranges::any_of(unit.parameters, [](const UnitParameter& p) { return p.requires_grad; });
  }
  bool IsHostBuffer(BufferId buffer) const { return buffer >= 0 && IsOnHost(plan_.buffers[buffer]); }

  // Streams that are not far enough, but for those that another one of them has waited for.
  std::vector<StreamId> StreamsToWaitFor(const Clock& needed) const {
    std::vector<StreamId> streams;
    for (std::size_t s = 0; s < needed.size(); ++s) {
      if (needed[s] > host_[s]) streams.push_back(static_cast<StreamId>(s));
    }
    for (std::size_t n = streams.size(); n-- > 0;) {
      const StreamId stream = streams[n];
      const auto covers = [&](StreamId other) {
        return other != stream && streams_[other][stream] >= needed[stream];
      };
      if (std::ranges::any_of(streams, covers))
        streams.erase(streams.begin() + static_cast<std::ptrdiff_t>(n));
    }
    return streams;
  }

  // How far streams have to be before the host steps the unit (-1: all of them).
  Clock NeededByStep(UnitId stepped) const {
    Clock needed(plan_.streams.size(), 0);
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      if (stepped >= 0 && stepped != static_cast<UnitId>(u)) continue;
      for (const BufferId shard : shards_[u]) {
        JoinClocks(needed, copies_[shard].from);
        JoinClocks(needed, copies_[shard].to);
      }
      for (const BufferId gradient : gradients_[u]) JoinClocks(needed, copies_[gradient].to);
    }
    return needed;
  }

  // ... before the host runs this instruction.
  Clock Needed(const Instruction& i) const {
    Clock needed(plan_.streams.size(), 0);
    if (i.stream >= 0) return needed;
    if (i.kind == InstructionKind::kOptimizerStep) return NeededByStep(i.unit);
    if (i.kind != InstructionKind::kGradAccumulate) return needed;
    if (IsHostBuffer(i.src)) JoinClocks(needed, copies_[i.src].to);
    if (IsHostBuffer(i.dst)) {
      JoinClocks(needed, copies_[i.dst].from);
      JoinClocks(needed, copies_[i.dst].to);
    }
    return needed;
  }

  void Issue(const Instruction& i) {
    switch (DescriptionOf(i.kind).order) {
      case OrderEffect::kRecords:
        JoinClocks(streams_[i.stream], host_);
        events_[i.event] = streams_[i.stream];
        return;
      case OrderEffect::kWaits:
        return JoinClocks(streams_[i.stream], events_[i.event]);
      case OrderEffect::kHostWaits:
        return JoinClocks(host_, events_[i.event]);
      case OrderEffect::kNone:  // alone, a rank copies its shard right to where it is computed with
      case OrderEffect::kMeets:
        break;
    }
    if (!IsWork(i.kind)) return;
    if (i.stream < 0 || (!IsHostBuffer(i.src) && !IsHostBuffer(i.dst))) return;
    JoinClocks(streams_[i.stream], host_);
    const std::int64_t done = streams_[i.stream][i.stream] = ++issued_[i.stream];
    if (IsHostBuffer(i.src)) copies_[i.src].from[i.stream] = done;
    if (IsHostBuffer(i.dst)) copies_[i.dst].to[i.stream] = done;
  }

  EventId EventOf(StreamId stream) {
    if (event_of_[stream] < 0) {
      event_of_[stream] = static_cast<EventId>(plan_.events.size());
      plan_.events.push_back("host_memory." + plan_.streams[stream].name);
      events_.emplace_back(plan_.streams.size(), 0);
    }
    return event_of_[stream];
  }

  InstructionList WithWaits(const InstructionList& list,
                            const std::vector<std::pair<std::size_t, StreamId>>& missing) {
    std::vector<Instruction> with;
    with.reserve(list.size() + 2 * missing.size());
    auto next = missing.begin();
    for (std::size_t n = 0; n <= list.size(); ++n) {
      for (; next != missing.end() && next->first == n; ++next) {
        const EventId event = EventOf(next->second);
        const SharedText reason("host_memory");
        with.push_back(
            {.kind = InstructionKind::kRecord, .stream = next->second, .event = event, .reason = reason});
        with.push_back({.kind = InstructionKind::kHostWait, .event = event, .reason = reason});
      }
      if (n < list.size()) with.push_back(list[n]);
    }
    return with;
  }

  Plan& plan_;
  std::vector<std::vector<BufferId>> shards_, gradients_;  // by unit that trains, in host memory
  std::vector<EventId> event_of_;                          // by stream
  Clock issued_;  // only copies count: between two of them a stream has nothing that the host could wait for
  Clock host_;
  std::vector<Clock> streams_, events_;
  std::vector<CopiesOf> copies_;
};

}  // namespace

void AwaitCopies(Plan& plan) {
  CopyWaits waits(plan);
  if (!waits.HasHostMemory()) return;
  bool added = false;
  const auto follow = [&](std::size_t first_step) {
    bool here = false;
    for (std::size_t s = first_step; s < plan.steps.size(); ++s) {
      for (Trigger& trigger : plan.steps[s].triggers) {
        here |= waits.Follow(trigger.instructions, trigger.kind == TriggerKind::kOptimizerStep);
      }
    }
    added |= here;
    return here;
  };
  follow(0);
  // Behind the last step the steady ones come again, with what it has left under way.
  while (follow(static_cast<std::size_t>(plan.steady_step))) {
  }
  for (Procedure& procedure : plan.procedures) {
    waits.Forget();
    added |= waits.Follow(procedure.instructions, false);
  }
  if (added) ShareInstructions(plan);
}

}  // namespace shardplan
