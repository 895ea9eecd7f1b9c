// One rank's step as discrete events: the host, the streams, the compute engine, the links.
//
// [Note: the host runs first]
// Nothing on the device changes what the host does, except a host wait. So the host issues everything up to
// its next host wait at once, noting when each instruction is issued; the device then runs until that wait's
// record is done. No later instruction could have been issued before, so nothing that the device did in
// between is missed.
//
// [Note: ranks that join]
// Where ranks are simulated apart, a collective belongs to all ranks of its group (`Joins`): a rank's stream
// comes to it, it begins when the last has, goes at the rate of the rank where it gets least, and ends for
// all at once. Everything else of a rank is its own. Without Joins one rank stands for all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/engine.h"

namespace shardplan::internal {

__extension__ using Int128 = __int128;

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// A million (parts per million) times 60, which up to six sharers divide exactly.
inline constexpr std::int64_t kSharers = 60;
inline constexpr std::int64_t kFullRate = 1'000'000 * kSharers;

enum class StreamStatus : std::uint8_t {
  kReady,
  kActive,
  kJoining,  // at a collective that other ranks have not come to
  kDone,
};

// What the collectives of several ranks are to one of them. `instruction` is an index into the code.
class Joins {
 public:
  virtual ~Joins() = default;
  // The stream of a rank has come to a collective. Whoever comes last has all of them Begun, itself too.
  virtual void Come(std::int32_t rank, std::size_t stream, std::int32_t instruction) = 0;
  // What the rank lets it have from now on.
  virtual void Offer(std::int32_t rank, std::int32_t instruction, std::int64_t old_rate,
                     std::int64_t rate) = 0;
};

// How a rank differs from the one that stands for all.
struct RankTraits {
  std::int32_t rank = 0;
  std::int64_t kernels_ppm = 1'000'000;  // of the time that its kernels take
  std::int64_t jitter_ppm = 0;           // at most so much more, of each piece of work by itself
  std::uint64_t seed = 0;
};

struct StreamState {
  std::int32_t head = -1;  // instruction that is next or running
  StreamStatus status = StreamStatus::kReady;
  WorkClass work = WorkClass::kCompute;
  std::int8_t loads = -1;
  std::int32_t passed = -1;       // instruction that was passed last
  std::int64_t wake_ns = kNever;  // the head cannot start before the host has issued it
  std::int64_t stalled_ns = -1;   // since when the head, a wait, has been waiting
  bool joined = false;            // at a collective of several ranks, whose end `Joins` says
  std::int64_t rate = 0;
  std::int64_t updated_ns = 0;  // `remaining` is as of then
  std::int64_t finish_ns = kNever;
  Int128 remaining = 0;            // rate x nanoseconds
  std::int32_t next_operator = 0;  // of a segment
  std::int64_t started_ns = 0;
  std::int32_t span = -1;
  std::int32_t last_span = -1;
  std::vector<std::int32_t> arrivals;  // spans whose records the next span of this stream waited for
};

class StepRunner {
 public:
  StepRunner(const EngineProgram& program, const EngineStep& step, EngineTimeline* timeline,
             const RunOptions& options, Joins* joins = nullptr, const RankTraits& traits = {})
      : program_(program),
        step_(step),
        timeline_(timeline),
        options_(options),
        joins_(joins),
        traits_(traits) {
    const auto streams = static_cast<std::size_t>(program.streams);
    streams_.resize(streams);
    for (std::size_t s = 0; s < streams; ++s) streams_[s].head = step.first_in_stream[s];
    issued_ns_.resize(step.code.size());
    slots_.assign(static_cast<std::size_t>(step.record_slots), {});
    finished_in_.assign(static_cast<std::size_t>(program.communicators), 0);
    result_.stream_busy_ns.resize(streams);
    result_.stream_operations.resize(streams);
    result_.phase_end_ns.resize(step.phases.size());
    result_.groups.resize(step.groups.size());
    const auto units = static_cast<std::size_t>(program.units);
    result_.unit_forward_ns.resize(units);
    result_.unit_backward_ns.resize(units);
    result_.unit_exposed_ns.resize(units);
    if (timeline_ == nullptr) return;
    for (auto* times : {&timeline_->host_start_ns, &timeline_->host_end_ns, &timeline_->issued_ns,
                        &timeline_->begin_ns, &timeline_->end_ns}) {
      times->resize(step.code.size());
    }
    timeline_->paced_by.assign(step.code.size(), -1);
  }

  Result<EngineResult> Run() {
    while (!Issue()) {
      if (!RunUntilPassed()) return Stuck(next_);
    }
    awaited_ = {};
    RunUntilPassed();
    if (const std::int32_t stuck = StuckAt(); stuck >= 0) return Stuck(stuck);
    return TakeResult();
  }

  // ---- where ranks are simulated apart: their events one by one, in order of time ----
  // Does everything that can be done now. The time of the rank's next event by itself, kNever: none.
  std::int64_t Settle() {
    Progress();
    while (next_ < std::ssize(step_.code) && (!blocked_ || Passed())) {
      blocked_ = !Issue();
      Progress();
    }
    UpdateRates();
    return NextEvent();
  }
  // To a time at or before its next event.
  void AdvanceTo(std::int64_t time_ns) {
    AccountUntil(time_ns);
    now_ns_ = time_ns;
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      if (streams_[s].status == StreamStatus::kActive && streams_[s].finish_ns == now_ns_) Finish(s);
    }
  }
  void BeginJoined(std::size_t s) {
    StreamState& stream = streams_[s];
    SHARDPLAN_ASSERT(stream.status == StreamStatus::kJoining, "only who came begins");
    Begin(s, stream);
    Activate(stream, step_.code[Index(stream.head)], 0);
    stream.joined = true;
    stream.finish_ns = kNever;
  }
  void FinishJoined(std::size_t s) {
    streams_[s].joined = false;
    Finish(s);
  }
  // An instruction that waits for ever once nothing is left to happen; -1: none.
  std::int32_t StuckAt() const {
    if (next_ < std::ssize(step_.code)) return next_;
    for (const StreamState& stream : streams_) {
      if (stream.status != StreamStatus::kDone) return stream.head;
    }
    return -1;
  }
  EngineResult TakeResult() {
    result_.end_ns.value = std::max(host_ns_, now_ns_);
    result_.host_work_ns = step_.host_work_ns;
    return std::move(result_);
  }
  static std::unexpected<Error> Stuck(std::int32_t instruction) {
    return std::unexpected(Error{ErrorCode::kNegative, "the step never ends: this instruction waits for ever",
                                 "", "/code/" + std::to_string(instruction), "", ""});
  }
  std::int64_t now_ns() const { return now_ns_; }

 private:
  struct Slot {
    bool done = false;
    std::int64_t time_ns = 0;
    std::int32_t span = -1;
  };

  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }

  std::int64_t HostRepeats(const EngineInstruction& instruction) const {
    return instruction.op == EngineOp::kSegment ? program_.segments[Index(instruction.operand)].count : 1;
  }

  // The host issues until something that it waits for is not there yet (false), or to the end.
  bool Issue() {
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
      }
      if (instruction.op == EngineOp::kHostWait && instruction.operand >= 0)
        host_ns_ = std::max(host_ns_, slots_[Index(instruction.operand)].time_ns);
      if (timeline_ != nullptr) AddHostSpan(i, instruction, started_ns_, host_ns_);
      auto& phase_end = result_.phase_end_ns[instruction.phase];
      if (step_.phases[instruction.phase] != Phase::kForward)
        phase_end.value = std::max(phase_end.value, host_ns_);
      stage_ = HostStage::kBefore;
    }
    return true;
  }

  // Before an instruction the host waits for the device where phases are timed apart, and for room in the
  // stream's queue.
  bool MayIssue(std::int32_t i, const EngineInstruction& instruction) {
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

  void IssueOne(std::int32_t i, const EngineInstruction& instruction) {
    started_ns_ = host_ns_;
    host_ns_ += instruction.host_ns.value * HostRepeats(instruction);
    result_.host_busy_ns.value += host_ns_ - started_ns_;
    // A segment's operators are issued one by one from its start on; anything else when its issue cost is
    // paid.
    issued_ns_[Index(i)] = instruction.op == EngineOp::kSegment ? started_ns_ : host_ns_;
    issued_ = i + 1;
    if (timeline_ != nullptr) timeline_->issued_ns[Index(i)].value = issued_ns_[Index(i)];
  }

  // Whether what the host waits for is there. Nothing in particular: never, until the device is idle.
  bool Passed() const {
    if (awaited_.slot >= 0) return slots_[Index(awaited_.slot)].done;
    if (awaited_.stream >= 0) return streams_[Index(awaited_.stream)].passed >= awaited_.instruction;
    return false;
  }

  // Runs the device until what the host waits for is there, or, for nothing in particular, until nothing is
  // left to do. False when it cannot be.
  bool RunUntilPassed() {
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

  std::int64_t NextEvent() const {
    std::int64_t next_ns = kNever;
    for (const StreamState& stream : streams_) {
      next_ns = std::min(next_ns, stream.status == StreamStatus::kActive ? stream.finish_ns : stream.wake_ns);
    }
    return next_ns;
  }

  // Starts whatever can start now. Passing a record or ending a collective may let another stream go on, so
  // the streams are tried until none moves.
  void Progress() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < streams_.size(); ++s) {
        while (streams_[s].status == StreamStatus::kReady && Step(s)) moved = true;
      }
    }
  }

  // Tries to pass or start the head of a stream; true when something changed.
  bool Step(std::size_t s) {
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

  void Pop(StreamState& stream) {
    SHARDPLAN_ASSERT(stream.head >= 0, "only a stream with an instruction at its head is advanced");
    if (timeline_ != nullptr) NoteEnd(stream);
    stream.passed = stream.head;
    if (!step_.queued_behind.empty()) {
      passed_ns_.resize(step_.code.size());
      passed_ns_[Index(stream.head)] = now_ns_;
    }
    stream.head = step_.next_in_stream[Index(stream.head)];
    stream.next_operator = 0;
    stream.span = -1;
  }

  bool PassWait(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
    if (instruction.operand >= 0) {
      const Slot& slot = slots_[Index(instruction.operand)];
      if (!slot.done) {
        if (stream.stalled_ns < 0) stream.stalled_ns = now_ns_;
        return false;
      }
      if (timeline_ != nullptr && slot.span >= 0) stream.arrivals.push_back(slot.span);
    }
    if (stream.stalled_ns >= 0 && stream.stalled_ns < now_ns_) {
      if (s == 0 && instruction.unit >= 0) {
        result_.unit_exposed_ns[Index(instruction.unit)].value += now_ns_ - stream.stalled_ns;
      }
      if (timeline_ != nullptr) {
        BeginSpan(s, stream, stream.stalled_ns);
        timeline_->spans.back().end_ns.value = now_ns_;
      }
    }
    stream.stalled_ns = -1;
    Pop(stream);
    return true;
  }

  bool StartWork(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
    if (instruction.work == WorkClass::kCollective) {
      const CollectiveGroup& group = step_.groups[Index(instruction.operand)];
      if (finished_in_[Index(group.communicator)] != instruction.sequence) return false;
      if (joins_ != nullptr) {
        stream.status = StreamStatus::kJoining;
        joins_->Come(traits_.rank, s, stream.head);
        return true;
      }
    }
    Begin(s, stream);
    Activate(stream, instruction, instruction.duration_ns.value);
    return true;
  }

  // Starts the next operators of a segment: all that are left when the host is ahead for good, else one.
  bool StartOperators(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
    const EngineSegment& segment = program_.segments[Index(instruction.operand)];
    const std::int64_t base_ns = issued_ns_[Index(stream.head)];
    if (stream.next_operator == segment.count) {
      if (base_ns > now_ns_) {
        stream.wake_ns = base_ns;
        return false;
      }
      if (segment.count > 0) EndWork(s, stream, instruction);
      Pop(stream);
      return true;
    }
    const EngineOperator& next = program_.operators[Index(segment.first + stream.next_operator)];
    const std::int64_t ready_ns = base_ns + instruction.host_ns.value * (stream.next_operator + 1);
    if (now_ns_ < ready_ns) {
      stream.wake_ns = ready_ns;
      if (timeline_ != nullptr) timeline_->paced_by[Index(stream.head)] = stream.next_operator;
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

  // What never began was passed when the stream came to it.
  void NoteEnd(const StreamState& stream) {
    const std::size_t i = Index(stream.head);
    timeline_->end_ns[i].value = now_ns_;
    const EngineInstruction& instruction = step_.code[i];
    const bool empty =
        instruction.op == EngineOp::kSegment && program_.segments[Index(instruction.operand)].count == 0;
    const bool works = instruction.op == EngineOp::kWork || instruction.op == EngineOp::kSegment;
    timeline_->begin_ns[i].value = works && !empty ? stream.started_ns : now_ns_;
  }

  void Begin(std::size_t s, StreamState& stream) {
    stream.started_ns = now_ns_;
    if (timeline_ != nullptr) BeginSpan(s, stream, now_ns_);
  }

  void Activate(StreamState& stream, const EngineInstruction& instruction, std::int64_t duration_ns) {
    stream.status = StreamStatus::kActive;
    stream.work = instruction.work;
    stream.loads = instruction.loads;
    SHARDPLAN_ASSERT(duration_ns >= 0, "LowerPlan makes no negative duration");
    if (joins_ != nullptr) duration_ns = OfThisRank(stream, duration_ns);
    stream.remaining = static_cast<Int128>(duration_ns) * kFullRate;
    stream.updated_ns = now_ns_;
    stream.rate = 0;
    stream.finish_ns = duration_ns == 0 ? now_ns_ : kNever;  // UpdateRates says when
    Count(stream, 1);
  }

  // Kernels of a rank that is slow, and each a little longer by chance.
  std::int64_t OfThisRank(const StreamState& stream, std::int64_t duration_ns) const {
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

  void Count(const StreamState& stream, std::int32_t change) {
    changed_ = true;
    switch (stream.work) {
      case WorkClass::kCompute:
        computing_ += change;
        [[fallthrough]];
      case WorkClass::kCopy:
        kernels_ += change;
        break;
      case WorkClass::kCollective:
        collectives_ += change;
        break;
      case WorkClass::kToHost:
        to_host_ += change;
        break;
      case WorkClass::kToDevice:
        to_device_ += change;
        break;
    }
  }

  std::int64_t RateOf(const StreamState& stream) {
    const std::int64_t kernel_ppm = collectives_ > 0 ? program_.compute_rate_ppm : 1'000'000;
    const std::int64_t link_ppm = kernels_ > 0 ? program_.communication_rate_ppm : 1'000'000;
    switch (stream.work) {
      case WorkClass::kCompute:
      case WorkClass::kCopy:
        SHARDPLAN_ASSERT(kernels_ > 0, "an active kernel is counted");
        return kernel_ppm * kSharers / kernels_;
      case WorkClass::kCollective:
        SHARDPLAN_ASSERT(collectives_ > 0, "an active collective is counted");
        return RateOfCollective(stream, link_ppm);
      case WorkClass::kToHost:
        SHARDPLAN_ASSERT(to_host_ > 0, "an active copy is counted");
        return kFullRate / to_host_;
      case WorkClass::kToDevice:
        SHARDPLAN_ASSERT(to_device_ > 0, "an active copy is counted");
        return kFullRate / to_device_;
    }
    return kFullRate;
  }

  std::int64_t RateOfCollective(const StreamState& stream, std::int64_t ppm) {
    std::int64_t rate = ppm * kSharers;
    if (collectives_ == 1) return rate;
    const LinkLoads& loads = program_.loads[Index(stream.loads)];
    for (std::size_t link = 0; link < loads.ppm.size(); ++link) {
      if (loads.ppm[link] > 0) rate = std::min(rate, RateOnLink(link, loads.ppm[link], ppm));
    }
    return rate;
  }

  // [Note: shares of a link] Those in flight are served from the smallest load up: each has what it needs, or
  // an equal share of what is left for it and those after it. With equal loads that is one of c for all c.
  std::int64_t RateOnLink(std::size_t link, std::int32_t load, std::int64_t ppm) {
    sharing_.clear();
    for (const StreamState& other : streams_) {
      if (other.status != StreamStatus::kActive || other.work != WorkClass::kCollective) continue;
      const std::int32_t wanted = program_.loads[Index(other.loads)].ppm[link];
      if (wanted > 0) sharing_.push_back(wanted);
    }
    std::ranges::sort(sharing_);
    std::int64_t left = 1'000'000;
    auto sharers = static_cast<std::int64_t>(sharing_.size());
    for (const std::int32_t wanted : sharing_) {
      if (wanted * sharers > left) break;
      if (wanted >= load) return ppm * kSharers;
      left -= wanted;
      --sharers;
    }
    return static_cast<std::int64_t>(Int128{ppm} * kSharers * left / (sharers * load));
  }

  void UpdateRates() {
    if (!changed_) return;
    changed_ = false;
    for (StreamState& stream : streams_) {
      if (stream.status != StreamStatus::kActive) continue;
      const std::int64_t rate = RateOf(stream);
      if (rate == stream.rate) continue;
      if (stream.joined) {
        joins_->Offer(traits_.rank, stream.head, std::exchange(stream.rate, rate), rate);
        continue;
      }
      stream.remaining -= static_cast<Int128>(stream.rate) * (now_ns_ - stream.updated_ns);
      stream.updated_ns = now_ns_;
      stream.rate = rate;
      stream.finish_ns = FinishTime(stream);
    }
  }

  std::int64_t FinishTime(const StreamState& stream) const {
    if (stream.remaining <= 0) return now_ns_;
    if (stream.rate == 0) return kNever;
    if (stream.remaining <= std::numeric_limits<std::int64_t>::max() - kFullRate) {
      return now_ns_ + (static_cast<std::int64_t>(stream.remaining) + stream.rate - 1) / stream.rate;
    }
    return now_ns_ + static_cast<std::int64_t>((stream.remaining + stream.rate - 1) / stream.rate);
  }

  // Adds the time from now to `next_ns`, in which nothing changes, to what is busy.
  void AccountUntil(std::int64_t next_ns) {
    const std::int64_t elapsed_ns = next_ns - now_ns_;
    if (elapsed_ns == 0) return;
    if (computing_ > 0) result_.compute_ns.value += elapsed_ns;
    if (collectives_ > 0) {
      result_.communication_ns.value += elapsed_ns;
      if (computing_ == 0) result_.exposed_ns.value += elapsed_ns;
    }
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      const StreamState& stream = streams_[s];
      if (stream.status != StreamStatus::kActive) continue;
      result_.stream_busy_ns[s].value += elapsed_ns;
      if (stream.work != WorkClass::kCollective) continue;
      GroupResult& group = result_.groups[Index(step_.code[Index(stream.head)].operand)];
      group.busy_ns.value += elapsed_ns;
      if (computing_ == 0) group.exposed_ns.value += elapsed_ns;
    }
  }

  void Finish(std::size_t s) {
    StreamState& stream = streams_[s];
    SHARDPLAN_ASSERT(stream.status == StreamStatus::kActive, "only what was started ends");
    Count(stream, -1);
    stream.status = StreamStatus::kReady;
    const EngineInstruction& instruction = step_.code[Index(stream.head)];
    if (instruction.op == EngineOp::kSegment) return;  // StartOperators starts the next operators, or ends it
    if (instruction.work == WorkClass::kCollective) {
      const CollectiveGroup& group = step_.groups[Index(instruction.operand)];
      ++finished_in_[Index(group.communicator)];
    }
    EndWork(s, stream, instruction);
    Pop(stream);
  }

  void EndWork(std::size_t s, StreamState& stream, const EngineInstruction& instruction) {
    ++result_.stream_operations[s];
    if (stream.span >= 0) timeline_->spans[Index(stream.span)].end_ns.value = now_ns_;
    const Phase phase = step_.phases[instruction.phase];
    if (phase != Phase::kForward || instruction.work == WorkClass::kCompute) {
      auto& phase_end = result_.phase_end_ns[instruction.phase];
      phase_end.value = std::max(phase_end.value, now_ns_);
    }
    if (instruction.op == EngineOp::kSegment && instruction.unit >= 0) {
      auto& times = phase == Phase::kForward ? result_.unit_forward_ns : result_.unit_backward_ns;
      times[Index(instruction.unit)].value += now_ns_ - stream.started_ns;
    }
  }

  void BeginSpan(std::size_t s, StreamState& stream, std::int64_t start_ns) {
    stream.span = static_cast<std::int32_t>(timeline_->spans.size());
    stream.last_span = stream.span;
    timeline_->spans.push_back({stream.head, static_cast<std::int8_t>(s), {start_ns}, {start_ns}});
    for (const std::int32_t recorded : stream.arrivals) timeline_->flows.push_back({recorded, stream.span});
    stream.arrivals.clear();
  }

  void AddHostSpan(std::int32_t i, const EngineInstruction& instruction, std::int64_t start_ns,
                   std::int64_t end_ns) {
    timeline_->host_start_ns[Index(i)].value = start_ns;
    timeline_->host_end_ns[Index(i)].value = end_ns;
    if (end_ns == start_ns) return;
    timeline_->spans.push_back({i, -1, {start_ns}, {end_ns}});
    if (instruction.op != EngineOp::kHostWait || instruction.operand < 0) return;
    const std::int32_t recorded = slots_[Index(instruction.operand)].span;
    if (recorded < 0) return;
    timeline_->flows.push_back({recorded, static_cast<std::int32_t>(timeline_->spans.size()) - 1});
  }

  const EngineProgram& program_;
  const EngineStep& step_;
  EngineTimeline* timeline_;
  const RunOptions options_;
  Joins* joins_;
  const RankTraits traits_;
  EngineResult result_;
  // What the host waits for: a record, or that a stream has passed an instruction; neither: an idle device.
  struct Awaited {
    std::int32_t slot = -1;
    std::int32_t stream = -1;
    std::int32_t instruction = -1;
  };
  enum class HostStage : std::uint8_t { kBefore, kIssued };
  Awaited awaited_;
  HostStage stage_ = HostStage::kBefore;  // of instruction `next_`
  bool synchronized_ = false;             // before it
  bool blocked_ = false;                  // Settle: it waits for something
  std::int32_t next_ = 0;                 // that the host issues
  std::int64_t host_ns_ = 0;
  std::int64_t started_ns_ = 0;          // when the host began it
  std::vector<std::int64_t> passed_ns_;  // by instruction, where queues have a depth
  std::vector<StreamState> streams_;
  std::vector<std::int64_t> issued_ns_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> finished_in_;  // collectives, by communicator
  std::vector<std::int32_t> sharing_;      // their loads of one link (ShareOf), kept for its memory
  std::int64_t now_ns_ = 0;
  std::int32_t issued_ = 0;
  std::int32_t computing_ = 0;
  std::int32_t kernels_ = 0;
  std::int32_t collectives_ = 0;
  std::int32_t to_host_ = 0;
  std::int32_t to_device_ = 0;
  bool changed_ = false;
};

}  // namespace shardplan::internal
