// SPDX-License-Identifier: Apache-2.0
// [Note: one run decides]
// A piece of work waits for things (the work before it on its stream, an event, the other ranks' arrival)
// that, once there, stay there. So it does not matter who goes first: run whatever can run until nothing can,
// and what is left over can never run in any order.
//
// [Note: streams of the model's collectives]
// Behind the plan's streams each rank has one for each group: where a collective of the model runs. It starts
// behind what the compute stream was given before; the compute stream waits for it at once or where the
// segment says.
#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"
#include "verifier/collectives.h"

namespace shardplan::verifier {
namespace {

// A stream's next work, as far as waiting is concerned.
struct Item {
  enum class Kind : std::uint8_t { kCollective, kRecord, kWait } kind = Kind::kRecord;
  std::int32_t index = 0;  // call of the rank, or number of the record
  Position at;
};

// The position of a rank's host, and what its streams have still to do.
struct RankState {
  std::size_t execution = 0, trigger = 0, instruction = 0;
  std::vector<std::deque<Item>> streams;
  std::vector<std::int32_t> latest_record;  // by event, -1: never
  std::vector<char> record_done;            // by record, in host order
  std::vector<Item> records;                // where each was issued, and on which stream
  std::vector<std::int32_t> record_stream;
  std::int32_t issued_calls = 0;
  std::vector<std::int32_t> done_calls;        // by group
  std::int32_t host_waits_for = -1;            // a record
  std::map<std::int32_t, std::int32_t> works;  // asynchronous collectives of the model: their records
  Position host_at;
};

class RankRun {
 public:
  explicit RankRun(const RankPrograms& programs) : p_(programs), ranks_(programs.plans.size()) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].streams.resize(p_.plans[r].streams.size() + p_.groups.size());
      ranks_[r].latest_record.assign(p_.plans[r].events.size(), -1);
      ranks_[r].done_calls.assign(p_.groups.size(), 0);
    }
    for (std::size_t g = 0; g < p_.groups.size(); ++g) {
      arrived_.emplace_back();
      members_.push_back(p_.Members(static_cast<std::int32_t>(g)));
    }
  }

  std::vector<WaitLink> Find() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) work_.push_back(static_cast<std::int64_t>(r));
    while (!work_.empty()) {
      const std::int64_t rank = work_.front();
      work_.pop_front();
      while (IssueMore(rank) || RunStreams(rank)) {
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      for (std::size_t s = 0; s < ranks_[r].streams.size(); ++s) {
        if (!ranks_[r].streams[s].empty()) return Circle(static_cast<std::int64_t>(r), s);
      }
    }
    return {};
  }

 private:
  // The host issues until it blocks or is done. True if it issued anything.
  bool IssueMore(std::int64_t rank) {
    RankState& state = ranks_[rank];
    const Plan& plan = p_.plans[rank];
    const std::vector<std::int32_t>& order = p_.steps[rank];
    bool moved = false;
    for (; state.execution < order.size(); ++state.execution, state.trigger = 0) {
      const std::int32_t step = order[state.execution];
      const std::vector<Trigger>& triggers = plan.steps[step].triggers;
      for (; state.trigger < triggers.size(); ++state.trigger, state.instruction = 0) {
        const std::vector<Instruction>& instructions = triggers[state.trigger].instructions;
        for (; state.instruction < instructions.size(); ++state.instruction) {
          const Position at = {step, static_cast<std::int32_t>(state.trigger),
                               static_cast<std::int32_t>(state.instruction)};
          const Instruction& i = instructions[state.instruction];
          if (!Issue(state, i, at)) return moved;
          if (DescriptionOf(i.kind).segment) IssueSegment(rank, plan.segments[i.segment], i.stream, at);
          moved = true;
        }
      }
    }
    return moved;
  }

  static bool Issue(RankState& state, const Instruction& i, Position at) {
    switch (DescriptionOf(i.kind).order) {
      case OrderEffect::kRecords:
        state.latest_record[i.event] = Record(state, i.stream, at);
        return true;
      case OrderEffect::kWaits:
        if (state.latest_record[i.event] >= 0) {
          state.streams[i.stream].push_back({Item::Kind::kWait, state.latest_record[i.event], at});
        }
        return true;
      case OrderEffect::kHostWaits: {
        const std::int32_t record = state.latest_record[i.event];
        const bool blocked = record >= 0 && !state.record_done[record];
        state.host_waits_for = blocked ? record : -1;
        state.host_at = at;
        return !blocked;
      }
      case OrderEffect::kMeets:
        state.streams[i.stream].push_back({Item::Kind::kCollective, state.issued_calls++, at});
        return true;
      case OrderEffect::kNone:
        return true;  // finishes as soon as it is first in its stream
    }
    return true;
  }

  static std::int32_t Record(RankState& state, std::int32_t stream, Position at) {
    const auto record = static_cast<std::int32_t>(state.record_done.size());
    state.records.push_back({Item::Kind::kRecord, record, at});
    state.record_stream.push_back(stream);
    state.streams[stream].push_back(state.records.back());
    state.record_done.push_back(false);
    return record;
  }

  // See [Note: streams of the model's collectives].
  void IssueSegment(std::int64_t rank, const Segment& segment, std::int32_t compute, Position at) {
    RankState& state = ranks_[rank];
    for (const SegmentEntry& entry : segment.entries) {
      std::int32_t done = -1;
      if (const auto* wait = std::get_if<CollectiveWaitEvent>(&entry)) {
        const auto found = state.works.find(wait->work);
        if (found != state.works.end()) done = found->second;
      } else if (const auto* op = std::get_if<OperatorEvent>(&entry); op != nullptr && op->collective) {
        const std::int32_t call = state.issued_calls++;
        const auto stream =
            static_cast<std::int32_t>(p_.plans[rank].streams.size()) + p_.calls[rank][call].group;
        state.streams[stream].push_back({Item::Kind::kWait, Record(state, compute, at), at});
        state.streams[stream].push_back({Item::Kind::kCollective, call, at});
        const std::int32_t record = Record(state, stream, at);
        (op->collective->work < 0 ? done : state.works[op->collective->work]) = record;
      }
      if (done >= 0) state.streams[compute].push_back({Item::Kind::kWait, done, at});
    }
  }

  bool RunStreams(std::int64_t rank) {
    bool moved = false;
    for (std::deque<Item>& stream : ranks_[rank].streams) {
      while (!stream.empty() && TryFront(rank, stream.front())) {
        stream.pop_front();
        moved = true;
      }
    }
    return moved;
  }

  bool TryFront(std::int64_t rank, const Item& item) {
    RankState& state = ranks_[rank];
    if (item.kind == Item::Kind::kRecord) {
      state.record_done[item.index] = true;
      return true;
    }
    if (item.kind == Item::Kind::kWait) return state.record_done[item.index];
    const CollectiveCall& call = p_.calls[rank][item.index];
    // A communicator runs its collectives one after the other, in the order of issue, whatever their streams.
    if (state.done_calls[call.group] != call.number) return false;
    std::set<std::int64_t>& here = arrived_[call.group];
    here.insert(rank);
    if (here.size() < members_[call.group].size()) return false;
    for (const std::int64_t member : members_[call.group]) Finish(member, call);
    here.clear();
    return false;  // Finish has popped it
  }

  void Finish(std::int64_t rank, const CollectiveCall& call) {
    RankState& state = ranks_[rank];
    SHARDPLAN_ASSERT(state.done_calls[call.group] == call.number, "all members are at the same call");
    ++state.done_calls[call.group];
    for (std::deque<Item>& stream : state.streams) {
      if (stream.empty() || stream.front().kind != Item::Kind::kCollective) continue;
      const CollectiveCall& front = p_.calls[rank][stream.front().index];
      if (front.group == call.group && front.number == call.number) stream.pop_front();
    }
    work_.push_back(rank);
  }

  // Follows who waits for whom from the front of a stream until it comes round.
  std::vector<WaitLink> Circle(std::int64_t rank, std::size_t stream) const {
    std::set<std::pair<std::int64_t, std::size_t>> seen;
    std::vector<WaitLink> circle;
    while (seen.emplace(rank, stream).second) {
      const Item& item = ranks_[rank].streams[stream].front();
      SHARDPLAN_ASSERT(item.kind != Item::Kind::kRecord, "a record at the front of its stream is done");
      if (item.kind == Item::Kind::kWait) {
        stream = ranks_[rank].record_stream[item.index];
        circle.push_back({WaitLink::For::kStream, rank, item.at, static_cast<std::int64_t>(stream)});
      } else {
        const CollectiveCall& call = p_.calls[rank][item.index];
        const std::int64_t absent = FirstAbsent(rank, call);
        circle.push_back({WaitLink::For::kRank, rank, item.at, absent});
        rank = absent;
        stream = BlockedStream(absent, call);
        const RankState& state = ranks_[rank];
        if (state.host_waits_for >= 0 && state.issued_calls <= CallIndex(absent, call)) {
          circle.push_back({WaitLink::For::kHost, rank, state.host_at, 0});
        }
      }
      if (ranks_[rank].streams[stream].empty()) break;
    }
    return circle;
  }

  std::int32_t CallIndex(std::int64_t rank, const CollectiveCall& call) const {
    return p_.by_group[rank][call.group][call.number];
  }

  // Who has not arrived at the call; the rank itself if an earlier call on the communicator holds it back.
  std::int64_t FirstAbsent(std::int64_t rank, const CollectiveCall& call) const {
    if (ranks_[rank].done_calls[call.group] != call.number) return rank;
    for (const std::int64_t member : members_[call.group]) {
      if (!arrived_[call.group].contains(member)) return member;
    }
    return rank;
  }

  // The stream whose front keeps `rank` from arriving at `call`.
  std::size_t BlockedStream(std::int64_t rank, const CollectiveCall& call) const {
    const RankState& state = ranks_[rank];
    const CollectiveCall next = {.group = call.group, .number = state.done_calls[call.group]};
    const std::int32_t index = CallIndex(rank, next);
    if (index >= state.issued_calls) {
      return static_cast<std::size_t>(state.host_waits_for < 0 ? 0
                                                               : state.record_stream[state.host_waits_for]);
    }
    for (std::size_t s = 0; s < state.streams.size(); ++s) {
      for (const Item& item : state.streams[s]) {
        if (item.kind == Item::Kind::kCollective && item.index == index) return s;
      }
    }
    return 0;
  }

  const RankPrograms& p_;
  std::vector<RankState> ranks_;
  std::vector<std::set<std::int64_t>> arrived_;     // by group: at its next collective
  std::vector<std::vector<std::int64_t>> members_;  // by group
  std::deque<std::int64_t> work_;
};

}  // namespace

std::vector<WaitLink> DeadlockOfRanks(const RankPrograms& programs) { return RankRun(programs).Find(); }

}  // namespace shardplan::verifier
