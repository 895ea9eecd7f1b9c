// SPDX-License-Identifier: Apache-2.0
#include "engine/step_runner.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "cost/group_placement.h"
#include "engine/host_order.h"
#include "shardplan/schemas/assert.h"

// Members that nobody outside calls are inline: the engine calls them for every event.
namespace shardplan::internal {

StepRunner::StepRunner(const EngineProgram& program, const EngineStep& step, EngineTimeline* timeline,
                       const RunOptions& options, Joins* joins, const RankTraits& traits)
    : program_(program),
      step_(step),
      options_(options),
      joins_(joins),
      traits_(traits),
      account_(program, step, timeline, options.activities),
      rates_(program),
      streams_(static_cast<std::size_t>(program.streams)),
      issued_ns_(step.code.size()),
      slots_(static_cast<std::size_t>(step.record_slots)),
      finished_in_(static_cast<std::size_t>(program.communicators)) {
  for (std::size_t s = 0; s < streams_.size(); ++s) streams_[s].head = step.first_in_stream[s];
  if (!step.owned.empty()) others_.assign(step.code.size(), 0);
  for (const auto& [instruction, work] : step.owned) {
    const std::int64_t place = PlaceInGroup(program.groups[Index(work.communicator)], traits.rank);
    others_[Index(instruction)] = place == work.owner ? 0 : 1;
  }
}

Result<EngineResult> StepRunner::Run() {
  while (!Issue()) {
    if (!RunUntilPassed()) return Stuck(next_);
  }
  awaited_ = {};
  RunUntilPassed();
  if (const std::int32_t stuck = StuckAt(); stuck >= 0) return Stuck(stuck);
  return TakeResult();
}

std::int64_t StepRunner::Settle() {
  Progress();
  while (next_ < std::ssize(step_.code) && (!blocked_ || Passed() || AwaitsIdle())) {
    blocked_ = !Issue();
    Progress();
  }
  UpdateRates();
  return NextEvent();
}

void StepRunner::AdvanceTo(std::int64_t time_ns) {
  account_.Pass(streams_, rates_, now_ns_, time_ns);
  now_ns_ = time_ns;
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    if (streams_[s].status == StreamStatus::kActive && streams_[s].finish_ns == now_ns_) Finish(s);
  }
}

void StepRunner::BeginJoined(std::size_t s) {
  StreamState& stream = streams_[s];
  SHARDPLAN_ASSERT(stream.status == StreamStatus::kJoining, "only who came begins");
  Begin(s, stream);
  Activate(stream, step_.code[Index(stream.head)], 0);
  stream.joined = true;
  stream.finish_ns = kNever;
}

void StepRunner::FinishJoined(std::size_t s) { Finish(s); }

std::int32_t StepRunner::StuckAt() const {
  if (next_ < std::ssize(step_.code)) return next_;
  for (const StreamState& stream : streams_) {
    if (stream.status != StreamStatus::kDone) return stream.head;
  }
  return -1;
}

EngineResult StepRunner::TakeResult() { return account_.Take(std::max(host_ns_, now_ns_)); }

std::unexpected<Error> StepRunner::Stuck(std::int32_t instruction) {
  return std::unexpected(Error{ErrorCode::kNegative, "the step never ends: this instruction waits for ever",
                               "", "/code/" + std::to_string(instruction), "", ""});
}

inline bool StepRunner::Issue() {
  const std::int32_t count = static_cast<std::int32_t>(step_.code.size());
  for (; next_ < count; ++next_) {
    const std::int32_t i = next_;
    const EngineInstruction& instruction = step_.code[Index(i)];
    if (stage_ == HostStage::kBefore) {
      if (!MayIssue(i, instruction)) return false;
      IssueOne(i, instruction);
      stage_ = HostStage::kIssued;
      if (instruction.op == EngineOp::kHostWait && instruction.operand >= 0) {
        awaited_ = {.slot = instruction.operand};
        return false;
      }
      if (HostStaysWith(program_, instruction)) {
        awaited_ = {.stream = instruction.stream, .instruction = i};
        return false;
      }
    }
    std::int32_t recorded = -1;
    if (instruction.op == EngineOp::kHostWait && instruction.operand >= 0) {
      const Slot& slot = slots_[Index(instruction.operand)];
      host_ns_ = std::max(host_ns_, slot.time_ns);
      recorded = slot.span;
    }
    if (HostStaysWith(program_, instruction)) host_ns_ = std::max(host_ns_, passed_ns_[Index(i)]);
    account_.HostEnds(i, started_ns_, host_ns_, recorded);
    stage_ = HostStage::kBefore;
  }
  return true;
}

// Before an instruction the host waits for the device where phases are timed apart, and for room in the
// stream's queue.
inline bool StepRunner::MayIssue(std::int32_t i, const EngineInstruction& instruction) {
  if (options_.synchronize_phases && i > 0 && !synchronized_ &&
      step_.code[Index(i - 1)].phase != instruction.phase) {
    awaited_ = {};
    synchronized_ = true;
    return false;
  }
  if (synchronized_) host_ns_ = std::max(host_ns_, now_ns_);
  synchronized_ = false;
  if (step_.queued_behind.empty() || step_.queued_behind[Index(i)] < 0) return true;
  awaited_ = {.stream = instruction.stream, .instruction = step_.queued_behind[Index(i)]};
  if (!Passed()) return false;
  host_ns_ = std::max(host_ns_, passed_ns_[Index(awaited_.instruction)]);
  return true;
}

inline void StepRunner::IssueOne(std::int32_t i, const EngineInstruction& instruction) {
  started_ns_ = host_ns_;
  // A segment's operators are issued one by one.
  const bool is_segment = instruction.op == EngineOp::kSegment;
  if (!IsOthers(i))
    host_ns_ +=
        instruction.host_ns.value * (is_segment ? program_.segments[Index(instruction.operand)].count : 1);
  // A segment's operators are issued from its start on; anything else when its issue cost is paid.
  issued_ns_[Index(i)] = is_segment ? started_ns_ : host_ns_;
  issued_ = i + 1;
  account_.HostBegins(i, started_ns_, host_ns_, issued_ns_[Index(i)]);
}

// Whether what the host waits for is there. Nothing in particular: never, until the device is idle.
inline bool StepRunner::Passed() const {
  if (awaited_.slot >= 0) return slots_[Index(awaited_.slot)].done;
  if (awaited_.stream >= 0) return streams_[Index(awaited_.stream)].passed >= awaited_.instruction;
  return false;
}

// Whether the host waits for an idle device, and it is idle: nothing runs, and nothing is waited for but what
// the host has yet to issue. It is asked where ranks are simulated apart.
bool StepRunner::AwaitsIdle() const {
  if (awaited_.slot >= 0 || awaited_.stream >= 0 || NextEvent() != kNever) return false;
  return std::ranges::none_of(
      streams_, [](const StreamState& stream) { return stream.status == StreamStatus::kJoining; });
}

// Runs the device until what the host waits for is there, or, for nothing in particular, until nothing is
// left to do. False when it cannot be.
inline bool StepRunner::RunUntilPassed() {
  while (true) {
    Progress();
    if (Passed()) return true;
    UpdateRates();
    const std::int64_t next_ns = NextEvent();
    if (next_ns == kNever) return awaited_.slot < 0 && awaited_.stream < 0;
    SHARDPLAN_ASSERT(next_ns >= now_ns_, "what is active ends now or later");
    AdvanceTo(next_ns);
  }
}

inline std::int64_t StepRunner::NextEvent() const {
  std::int64_t next_ns = kNever;
  for (const StreamState& stream : streams_) {
    next_ns = std::min(next_ns, stream.status == StreamStatus::kActive ? stream.finish_ns : stream.wake_ns);
  }
  return next_ns;
}

// Starts whatever can start now. Passing a record or ending a collective may let another stream go on, so
// the streams are tried until none moves.
inline void StepRunner::Progress() {
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      while (streams_[s].status == StreamStatus::kReady && Step(s)) moved = true;
    }
  }
}

// Tries to pass or start the head of a stream; true when something changed.
inline bool StepRunner::Step(std::size_t s) {
  StreamState& stream = streams_[s];
  stream.wake_ns = kNever;
  if (stream.head < 0) {
    stream.status = StreamStatus::kDone;
    return false;
  }
  if (stream.head >= issued_) return false;
  const EngineInstruction& instruction = step_.code[Index(stream.head)];
  if (instruction.op != EngineOp::kSegment && issued_ns_[Index(stream.head)] > now_ns_) {
    stream.wake_ns = issued_ns_[Index(stream.head)];
    return false;
  }
  switch (instruction.op) {
    case EngineOp::kRecord:
      slots_[Index(instruction.operand)] = {true, now_ns_, stream.last_span};
      Pop(stream);
      return true;
    case EngineOp::kWait:
      return PassWait(s, stream, instruction);
    case EngineOp::kWork:
      return StartWork(s, stream, instruction);
    case EngineOp::kSegment:
      return StartOperators(s, stream, instruction);
    default:
      Pop(stream);
      return true;
  }
}

inline void StepRunner::Pop(StreamState& stream) {
  SHARDPLAN_ASSERT(stream.head >= 0, "only a stream with an instruction at its head is advanced");
  account_.Leave(stream, now_ns_, IsOthers(stream.head));
  stream.passed = stream.head;
  if (!step_.queued_behind.empty()) {
    passed_ns_.resize(step_.code.size());
    passed_ns_[Index(stream.head)] = now_ns_;
  }
  stream.head = step_.next_in_stream[Index(stream.head)];
  stream.next_operator = 0;
  stream.span = -1;
}

inline bool StepRunner::PassWait(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
  std::int32_t recorded = -1;
  if (instruction.operand >= 0) {
    const Slot& slot = slots_[Index(instruction.operand)];
    if (!slot.done) {
      if (stream.stalled_ns < 0) stream.stalled_ns = now_ns_;
      return false;
    }
    recorded = slot.span;
  }
  account_.EndWait(s, stream, recorded, now_ns_);
  stream.stalled_ns = -1;
  Pop(stream);
  return true;
}

inline bool StepRunner::StartWork(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
  if (instruction.work == WorkClass::kCollective) {
    const CollectiveGroup& group = step_.groups[Index(instruction.operand)];
    if (finished_in_[Index(group.communicator)] != instruction.sequence) return false;
    if (joins_ != nullptr && joins_->IsJoined(traits_.rank, stream.head)) {
      stream.status = StreamStatus::kJoining;
      joins_->Come(traits_.rank, s, stream.head);
      return true;
    }
    if (traits_.collectives != nullptr) return StartAmongOthers(s, stream);
  }
  Begin(s, stream);
  Activate(stream, instruction, instruction.duration_ns.value);
  return true;
}

// A collective whose begin and end are those of all its ranks.
inline bool StepRunner::StartAmongOthers(std::size_t s, StreamState& stream) {
  const CollectiveTimes& times = (*traits_.collectives)[Index(stream.head)];
  if (times.begin_ns.value > now_ns_) {
    stream.wake_ns = times.begin_ns.value;
    return false;
  }
  Begin(s, stream);
  Activate(stream, step_.code[Index(stream.head)], 0);
  stream.joined = true;
  stream.finish_ns = std::max(times.end_ns.value, now_ns_);
  return true;
}

// Starts the next operators of a segment: all that are left when the host is ahead for good, else one.
inline bool StepRunner::StartOperators(std::size_t s, StreamState& stream,
                                       const EngineInstruction& instruction) {
  const EngineSegment& segment = program_.segments[Index(instruction.operand)];
  const bool others = IsOthers(stream.head);
  const std::int64_t base_ns = issued_ns_[Index(stream.head)];
  if (others || stream.next_operator == segment.count) {
    if (base_ns > now_ns_) {
      stream.wake_ns = base_ns;
      return false;
    }
    if (segment.count > 0 && !others) account_.EndWork(s, stream, now_ns_);
    Pop(stream);
    return true;
  }
  const EngineOperator& next = program_.operators[Index(segment.first + stream.next_operator)];
  const std::int64_t ready_ns = base_ns + instruction.host_ns.value * (stream.next_operator + 1);
  if (now_ns_ < ready_ns) {
    stream.wake_ns = ready_ns;
    account_.PacedBy(stream);
    return false;
  }
  if (stream.next_operator == 0) Begin(s, stream);
  if (now_ns_ >= base_ns + next.lag_ns.value) {
    stream.next_operator = segment.count;
    Activate(stream, instruction, next.rest_ns.value);
  } else {
    ++stream.next_operator;
    Activate(stream, instruction, next.duration_ns.value);
  }
  return true;
}

inline void StepRunner::Begin(std::size_t s, StreamState& stream) {
  stream.started_ns = now_ns_;
  account_.Begin(s, stream, now_ns_);
}

inline void StepRunner::Activate(StreamState& stream, const EngineInstruction& instruction,
                                 std::int64_t duration_ns) {
  stream.status = StreamStatus::kActive;
  stream.work = instruction.work;
  stream.loads = instruction.loads;
  SHARDPLAN_ASSERT(duration_ns >= 0, "LowerPlan makes no negative duration");
  if (joins_ != nullptr) duration_ns = OfThisRank(stream, duration_ns);
  stream.remaining = static_cast<Int128>(duration_ns) * kFullRate;
  stream.updated_ns = now_ns_;
  stream.rate = 0;
  stream.finish_ns = duration_ns == 0 ? now_ns_ : kNever;  // UpdateRates says when
  rates_.Count(stream, 1);
}

// Kernels of a rank that is slow, and each a little longer by chance.
inline std::int64_t StepRunner::OfThisRank(const StreamState& stream, std::int64_t duration_ns) const {
  if (stream.work != WorkClass::kCompute && stream.work != WorkClass::kCopy) return duration_ns;
  std::int64_t more_ppm = traits_.kernels_ppm - 1'000'000;
  if (traits_.jitter_ppm > 0) {
    // splitmix64 of seed, rank, instruction and operator.
    std::uint64_t mixed =
        traits_.seed + 0x9E3779B97F4A7C15ULL * (static_cast<std::uint64_t>(traits_.rank) + 1);
    mixed ^=
        (static_cast<std::uint64_t>(stream.head) << 20) + static_cast<std::uint64_t>(stream.next_operator);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    mixed ^= mixed >> 31;
    more_ppm += static_cast<std::int64_t>(mixed % static_cast<std::uint64_t>(traits_.jitter_ppm + 1));
  }
  return duration_ns + static_cast<std::int64_t>(Int128{duration_ns} * more_ppm / 1'000'000);
}

inline void StepRunner::UpdateRates() {
  if (!rates_.TakeChanged()) return;
  for (StreamState& stream : streams_) {
    if (stream.status != StreamStatus::kActive) continue;
    const std::int64_t rate = rates_.Of(stream, streams_);
    if (rate == stream.rate) continue;
    if (stream.joined) {
      const std::int64_t before = std::exchange(stream.rate, rate);
      if (joins_ != nullptr) joins_->Offer(traits_.rank, stream.head, before, rate);
      continue;
    }
    stream.remaining -= static_cast<Int128>(stream.rate) * (now_ns_ - stream.updated_ns);
    stream.updated_ns = now_ns_;
    stream.rate = rate;
    stream.finish_ns = FinishTime(stream);
  }
}

inline std::int64_t StepRunner::FinishTime(const StreamState& stream) const {
  if (stream.remaining <= 0) return now_ns_;
  if (stream.rate == 0) return kNever;
  if (stream.remaining <= std::numeric_limits<std::int64_t>::max() - kFullRate) {
    return now_ns_ + (static_cast<std::int64_t>(stream.remaining) + stream.rate - 1) / stream.rate;
  }
  return now_ns_ + static_cast<std::int64_t>((stream.remaining + stream.rate - 1) / stream.rate);
}

inline void StepRunner::Finish(std::size_t s) {
  StreamState& stream = streams_[s];
  SHARDPLAN_ASSERT(stream.status == StreamStatus::kActive, "only what was started ends");
  stream.joined = false;
  rates_.Count(stream, -1);
  stream.status = StreamStatus::kReady;
  const EngineInstruction& instruction = step_.code[Index(stream.head)];
  if (instruction.op == EngineOp::kSegment) return;  // StartOperators starts the next operators, or ends it
  if (instruction.work == WorkClass::kCollective) {
    const CollectiveGroup& group = step_.groups[Index(instruction.operand)];
    ++finished_in_[Index(group.communicator)];
  }
  account_.EndWork(s, stream, now_ns_);
  Pop(stream);
}

}  // namespace shardplan::internal
