// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/critical_path.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/host_order.h"
#include "engine/owners.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

struct CauseName {
  TimeCause cause;
  std::string_view name;
};
constexpr std::array<CauseName, kTimeCauses> kCauseNames = {{
    {TimeCause::kForward, "forward"},
    {TimeCause::kBackward, "backward"},
    {TimeCause::kRecompute, "recomputation"},
    {TimeCause::kOptimizer, "optimizer"},
    {TimeCause::kKernelsSlowed, "kernels slowed"},
    {TimeCause::kAllGather, "all_gather"},
    {TimeCause::kReduceScatter, "reduce_scatter"},
    {TimeCause::kAllReduce, "all_reduce"},
    {TimeCause::kAllToAll, "all_to_all"},
    {TimeCause::kSendReceive, "send_recv"},
    {TimeCause::kOtherCollective, "other_collective"},
    {TimeCause::kCollectivesSlowed, "collectives slowed"},
    {TimeCause::kCopies, "copies"},
    {TimeCause::kHostLink, "host link"},
    {TimeCause::kHostIssue, "host issuing"},
    {TimeCause::kHostWork, "host computing"},
    {TimeCause::kOtherOwners, "other owners"},
}};

// Goes back from the end of a step. `time_` only falls; at equal times the walk follows the order in which
// things were given to streams and host, so it ends.
class Walk {
 public:
  Walk(const Plan& plan, const EngineProgram& program, const EngineTimeline& timeline)
      : plan_(plan), program_(program), step_(program.steps.back()), timeline_(timeline) {
    before_in_stream_.assign(step_.code.size(), -1);
    record_of_slot_.assign(static_cast<std::size_t>(step_.record_slots), -1);
    before_in_communicator_.assign(step_.code.size(), -1);
    std::vector<std::int32_t> last(static_cast<std::size_t>(program.communicators), -1);
    for (std::int32_t i = 0; i < std::ssize(step_.code); ++i) {
      const EngineInstruction& code = Code(i);
      const std::int32_t next = step_.next_in_stream[Index(i)];
      if (next >= 0) before_in_stream_[Index(next)] = i;
      if (code.op == EngineOp::kRecord) record_of_slot_[Index(code.operand)] = i;
      if (code.op != EngineOp::kWork || code.work != WorkClass::kCollective) continue;
      std::int32_t& of = last[Index(step_.groups[Index(code.operand)].communicator)];
      before_in_communicator_[Index(i)] = std::exchange(of, i);
    }
  }

  CriticalPath Run(Nanoseconds end) {
    path_.step_ns = end;
    time_ = end.value;
    at_ = static_cast<std::int32_t>(step_.code.size()) - 1;
    on_host_ = true;
    for (std::int32_t i = 0; i < std::ssize(step_.code); ++i) {
      if (Code(i).stream < 0 || timeline_.end_ns[Index(i)] != end) continue;
      at_ = i;  // the last of them
      on_host_ = false;
    }
    while (time_ > 0) on_host_ ? PassHost() : PassStream();
    std::ranges::reverse(path_.parts);
    return std::move(path_);
  }

 private:
  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  const EngineInstruction& Code(std::int32_t i) const { return step_.code[Index(i)]; }
  std::int64_t End(std::int32_t i) const { return timeline_.end_ns[Index(i)].value; }

  void Add(TimeCause cause, std::int64_t duration_ns) {
    if (duration_ns == 0) return;
    SHARDPLAN_ASSERT(duration_ns > 0, "nothing ends before it begins");
    path_.parts.push_back({cause, Code(at_).unit, step_.origins[Index(at_)], {duration_ns}});
  }

  // The host has come to `time_` in instruction `at_`, or has done it just then.
  void PassHost() {
    const EngineInstruction& code = Code(at_);
    const std::int64_t begin = timeline_.host_start_ns[Index(at_)].value;
    if (code.op == EngineOp::kHostWait && code.operand >= 0) {
      const std::int32_t record = record_of_slot_[Index(code.operand)];
      if (time_ > begin + code.host_ns.value && End(record) == time_) {
        at_ = record;
        on_host_ = false;
        return;
      }
    }
    const bool waited = time_ > timeline_.issued_ns[Index(at_)].value && End(at_) == time_;
    if (waited && internal::HostStaysWith(program_, code)) {
      on_host_ = false;
      return;
    }
    AddHost(time_ - begin);
    time_ = begin;
    SHARDPLAN_ASSERT(at_ > 0 || time_ == 0, "the host begins at 0");
    if (at_ > 0 && timeline_.host_end_ns[Index(at_ - 1)].value < begin) {
      at_ = step_.queued_behind[Index(at_)];  // the stream had to pass it first
      on_host_ = false;
      return;
    }
    --at_;
  }

  // Work of the host itself is done before the rest of an instruction is issued.
  void AddHost(std::int64_t elapsed_ns) {
    const auto work = step_.host_work_of.find(at_);
    const std::int64_t work_ns =
        work == step_.host_work_of.end() ? 0 : std::min(elapsed_ns, work->second.value);
    Add(TimeCause::kHostIssue, elapsed_ns - work_ns);
    Add(TimeCause::kHostWork, work_ns);
  }

  // Instruction `at_` of a stream is done at `time_`.
  void PassStream() {
    const EngineInstruction& code = Code(at_);
    std::int64_t begin = timeline_.begin_ns[Index(at_)].value;
    if (code.op == EngineOp::kWork) {
      AddWork(code, code.duration_ns.value, time_ - begin);
    } else if (code.op == EngineOp::kSegment) {
      const EngineSegment& segment = program_.segments[Index(code.operand)];
      const std::int32_t paced = timeline_.paced_by[Index(at_)];
      if (segment.count > 0 && !internal::IsOthers(program_, step_, at_)) {
        const std::int32_t first = std::max(paced, 0);
        if (paced >= 0) begin = timeline_.issued_ns[Index(at_)].value + code.host_ns.value * (paced + 1);
        AddWork(code, program_.operators[Index(segment.first + first)].rest_ns.value, time_ - begin);
      }
      if (paced >= 0) {
        time_ = begin;
        on_host_ = true;
        return;
      }
    }
    time_ = begin;
    GoBack(code);
  }

  // To what instruction `at_` of a stream began at, which is `time_`.
  void GoBack(const EngineInstruction& code) {
    const std::int32_t before = before_in_stream_[Index(at_)];
    if (before >= 0 && End(before) == time_) {
      at_ = before;
      return;
    }
    if (code.op == EngineOp::kWait && code.operand >= 0) {
      const std::int32_t record = record_of_slot_[Index(code.operand)];
      if (End(record) == time_) {
        at_ = record;
        return;
      }
    }
    const std::int32_t collective = before_in_communicator_[Index(at_)];
    if (collective >= 0 && End(collective) == time_) {
      at_ = collective;
      return;
    }
    if (timeline_.issued_ns[Index(at_)].value == time_) {
      on_host_ = true;
      return;
    }
    SHARDPLAN_ASSERT(!step_.owned.empty() && code.work == WorkClass::kCollective,
                     "something lets everything begin");
    WaitForOwners(before, collective);
  }

  // The collective could have begun when the last of these was there.
  void WaitForOwners(std::int32_t before, std::int32_t collective) {
    std::int64_t ready_ns = timeline_.issued_ns[Index(at_)].value;
    if (before >= 0) ready_ns = std::max(ready_ns, End(before));
    if (collective >= 0) ready_ns = std::max(ready_ns, End(collective));
    Add(TimeCause::kOtherOwners, time_ - ready_ns);
    time_ = ready_ns;
    GoBack(Code(at_));
  }

  void AddWork(const EngineInstruction& code, std::int64_t alone_ns, std::int64_t elapsed_ns) {
    const bool kernel = code.work == WorkClass::kCompute || code.work == WorkClass::kCopy;
    const bool link = code.work == WorkClass::kCollective;
    // Time is whole nanoseconds: work is not done before its duration.
    SHARDPLAN_ASSERT(elapsed_ns >= alone_ns, "nothing is faster than alone");
    const std::int64_t slowed_ns = kernel || link ? elapsed_ns - alone_ns : 0;
    Add(link ? TimeCause::kCollectivesSlowed : TimeCause::kKernelsSlowed, slowed_ns);
    Add(CauseOf(code), elapsed_ns - slowed_ns);
  }

  // The causes of collectives stand in the order of their activities.
  static TimeCause CauseOf(CollectiveKind kind) {
    const auto activity = static_cast<std::size_t>(ActivityOf(kind));
    return static_cast<TimeCause>(static_cast<std::size_t>(TimeCause::kAllGather) + activity -
                                  static_cast<std::size_t>(DeviceActivity::kAllGather));
  }

  TimeCause CauseOf(const EngineInstruction& code) const {
    switch (code.work) {
      case WorkClass::kCopy:
        return TimeCause::kCopies;
      case WorkClass::kToHost:
      case WorkClass::kToDevice:
        return TimeCause::kHostLink;
      case WorkClass::kCollective:
        return CauseOf(step_.groups[Index(code.operand)].kind);
      case WorkClass::kCompute:
        break;
    }
    if (code.op != EngineOp::kSegment) return TimeCause::kOptimizer;
    switch (plan_.segments[Index(program_.segments[Index(code.operand)].of)].phase) {
      case SegmentPhase::kForward:
      case SegmentPhase::kLoss:
        return TimeCause::kForward;
      case SegmentPhase::kBackward:
        return TimeCause::kBackward;
      case SegmentPhase::kRecompute:
        return TimeCause::kRecompute;
      case SegmentPhase::kOptimizer:
        return TimeCause::kOptimizer;
    }
    return TimeCause::kForward;
  }

  const Plan& plan_;
  const EngineProgram& program_;
  const EngineStep& step_;
  const EngineTimeline& timeline_;
  std::vector<std::int32_t> before_in_stream_;        // by code, -1: the first
  std::vector<std::int32_t> before_in_communicator_;  // likewise
  std::vector<std::int32_t> record_of_slot_;
  CriticalPath path_;
  std::int64_t time_ = 0;
  std::int32_t at_ = 0;
  bool on_host_ = false;
};

}  // namespace

std::string_view Name(TimeCause cause) { return kCauseNames[static_cast<std::size_t>(cause)].name; }

Result<CriticalPath> FindCriticalPath(const Plan& plan, const EngineProgram& program) {
  EngineTimeline timeline;
  const auto last = static_cast<std::int32_t>(program.steps.size()) - 1;
  const Result<EngineResult> run = RunStep(program, last, &timeline);
  if (!run) return std::unexpected(run.error());
  return Walk(plan, program, timeline).Run(run->end_ns);
}

TimeByCause SumByCause(const CriticalPath& path) {
  TimeByCause sums{};
  for (const PathPart& part : path.parts) sums[static_cast<std::size_t>(part.cause)] += part.duration_ns;
  return sums;
}

}  // namespace shardplan
