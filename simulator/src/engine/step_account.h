// SPDX-License-Identifier: Apache-2.0
// Costs of a step so far: busy and exposed time, ends of phases, and, if somebody wants it, the timeline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/rates.h"
#include "engine/stream_state.h"

namespace shardplan::internal {

// The activity of the device while an instruction with work runs.
inline DeviceActivity ActivityOf(const EngineStep& step, const EngineInstruction& instruction) {
  switch (instruction.work) {
    case WorkClass::kCompute:
      switch (step.phases[instruction.phase]) {
        case Phase::kForward:
          return DeviceActivity::kForward;
        case Phase::kBackward:
          return DeviceActivity::kBackward;
        case Phase::kOptimizer:
          return DeviceActivity::kOptimizer;
      }
      break;
    case WorkClass::kCopy:
      return DeviceActivity::kCopies;
    case WorkClass::kCollective:
      return shardplan::ActivityOf(step.groups[static_cast<std::size_t>(instruction.operand)].kind);
    case WorkClass::kToHost:
    case WorkClass::kToDevice:
      return DeviceActivity::kHostLink;
  }
  return DeviceActivity::kIdle;
}

class StepAccount {
 public:
  // timeline: null where nobody wants one. activities: as RunOptions.
  StepAccount(const EngineProgram& program, const EngineStep& step, EngineTimeline* timeline,
              bool activities);

  // ---- the host ----
  void HostBegins(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns, std::int64_t issued_ns);
  // recorded: the span whose record it waited for; -1: none.
  void HostEnds(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns, std::int32_t recorded);

  // ---- streams ----
  // From now to then nothing changes.
  void Pass(const std::vector<StreamState>& streams, const Rates& rates, std::int64_t now_ns,
            std::int64_t then_ns);
  void Begin(std::size_t s, StreamState& stream, std::int64_t start_ns);
  void EndWork(std::size_t s, const StreamState& stream, std::int64_t now_ns);
  // The wait at the head of the stream is over; stream.stalled_ns: since when it has waited. recorded as in
  // HostEnds.
  void EndWait(std::size_t s, StreamState& stream, std::int32_t recorded, std::int64_t now_ns);
  // The host is not far enough ahead for this operator of the head, a segment.
  void PacedBy(const StreamState& stream);
  // The stream goes on behind its head.
  // `others`: its head is another rank's work.
  void Leave(const StreamState& stream, std::int64_t now_ns, bool others);

  EngineResult Take(std::int64_t end_ns);

 private:
  const EngineInstruction& HeadOf(const StreamState& stream) const {
    return step_.code[static_cast<std::size_t>(stream.head)];
  }
  void BeginSpan(std::size_t s, StreamState& stream, std::int64_t start_ns);
  void PassActivity(const std::vector<StreamState>& streams, std::int64_t elapsed_ns);

  const EngineProgram& program_;
  const EngineStep& step_;
  EngineTimeline* timeline_;
  const bool activities_;
  EngineResult result_;
};

// In the header: the engine calls them for every event.
inline StepAccount::StepAccount(const EngineProgram& program, const EngineStep& step,
                                EngineTimeline* timeline, bool activities)
    : program_(program), step_(step), timeline_(timeline), activities_(activities) {
  const auto streams = static_cast<std::size_t>(program.streams);
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

inline void StepAccount::HostBegins(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns,
                                    std::int64_t issued_ns) {
  result_.host_busy_ns.value += to_ns - from_ns;
  if (timeline_ != nullptr) timeline_->issued_ns[static_cast<std::size_t>(i)].value = issued_ns;
}

inline void StepAccount::HostEnds(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns,
                                  std::int32_t recorded) {
  const EngineInstruction& instruction = step_.code[static_cast<std::size_t>(i)];
  if (step_.phases[instruction.phase] != Phase::kForward) {
    auto& phase_end = result_.phase_end_ns[instruction.phase];
    phase_end.value = std::max(phase_end.value, to_ns);
  }
  if (timeline_ == nullptr) return;
  timeline_->host_start_ns[static_cast<std::size_t>(i)].value = from_ns;
  timeline_->host_end_ns[static_cast<std::size_t>(i)].value = to_ns;
  if (to_ns == from_ns) return;
  timeline_->spans.push_back({i, -1, {from_ns}, {to_ns}});
  if (recorded < 0) return;
  timeline_->flows.push_back({recorded, static_cast<std::int32_t>(timeline_->spans.size()) - 1});
}

inline void StepAccount::Pass(const std::vector<StreamState>& streams, const Rates& rates,
                              std::int64_t now_ns, std::int64_t then_ns) {
  const std::int64_t elapsed_ns = then_ns - now_ns;
  if (elapsed_ns == 0) return;
  if (rates.computes()) result_.compute_ns.value += elapsed_ns;
  if (rates.communicates()) {
    result_.communication_ns.value += elapsed_ns;
    if (!rates.computes()) result_.exposed_ns.value += elapsed_ns;
  }
  if (activities_) PassActivity(streams, elapsed_ns);
  for (std::size_t s = 0; s < streams.size(); ++s) {
    const StreamState& stream = streams[s];
    if (stream.status != StreamStatus::kActive) continue;
    result_.stream_busy_ns[s].value += elapsed_ns;
    if (stream.work != WorkClass::kCollective) continue;
    GroupResult& group = result_.groups[static_cast<std::size_t>(HeadOf(stream).operand)];
    group.busy_ns.value += elapsed_ns;
    if (!rates.computes()) group.exposed_ns.value += elapsed_ns;
  }
}

inline void StepAccount::PassActivity(const std::vector<StreamState>& streams, std::int64_t elapsed_ns) {
  DeviceActivity activity = DeviceActivity::kIdle;
  for (const StreamState& stream : streams) {
    if (stream.status != StreamStatus::kActive) continue;
    activity = std::min(activity, ActivityOf(step_, HeadOf(stream)));
    if (stream.work != WorkClass::kCompute) continue;
    const Phase phase = step_.phases[HeadOf(stream).phase];
    result_.compute_busy_ns[static_cast<std::size_t>(phase)].value += elapsed_ns;
  }
  result_.activity_ns[static_cast<std::size_t>(activity)].value += elapsed_ns;
}

inline void StepAccount::Begin(std::size_t s, StreamState& stream, std::int64_t start_ns) {
  if (timeline_ != nullptr) BeginSpan(s, stream, start_ns);
}

inline void StepAccount::EndWork(std::size_t s, const StreamState& stream, std::int64_t now_ns) {
  const EngineInstruction& instruction = HeadOf(stream);
  ++result_.stream_operations[s];
  if (stream.span >= 0) timeline_->spans[static_cast<std::size_t>(stream.span)].end_ns.value = now_ns;
  const Phase phase = step_.phases[instruction.phase];
  if (phase != Phase::kForward || instruction.work == WorkClass::kCompute) {
    auto& phase_end = result_.phase_end_ns[instruction.phase];
    phase_end.value = std::max(phase_end.value, now_ns);
  }
  if (instruction.op == EngineOp::kSegment && instruction.unit >= 0) {
    auto& times = phase == Phase::kForward ? result_.unit_forward_ns : result_.unit_backward_ns;
    times[static_cast<std::size_t>(instruction.unit)].value += now_ns - stream.started_ns;
  }
}

inline void StepAccount::EndWait(std::size_t s, StreamState& stream, std::int32_t recorded,
                                 std::int64_t now_ns) {
  if (timeline_ != nullptr && recorded >= 0) stream.arrivals.push_back(recorded);
  if (stream.stalled_ns < 0 || stream.stalled_ns >= now_ns) return;
  const EngineInstruction& instruction = HeadOf(stream);
  if (s == 0 && instruction.unit >= 0) {
    result_.unit_exposed_ns[static_cast<std::size_t>(instruction.unit)].value += now_ns - stream.stalled_ns;
  }
  if (timeline_ == nullptr) return;
  BeginSpan(s, stream, stream.stalled_ns);
  timeline_->spans.back().end_ns.value = now_ns;
}

inline void StepAccount::PacedBy(const StreamState& stream) {
  if (timeline_ != nullptr) timeline_->paced_by[static_cast<std::size_t>(stream.head)] = stream.next_operator;
}

// A wait that never began was passed when the stream came to it.
inline void StepAccount::Leave(const StreamState& stream, std::int64_t now_ns, bool others) {
  if (timeline_ == nullptr) return;
  timeline_->end_ns[static_cast<std::size_t>(stream.head)].value = now_ns;
  const EngineInstruction& instruction = HeadOf(stream);
  const bool empty = instruction.op == EngineOp::kSegment &&
                     program_.segments[static_cast<std::size_t>(instruction.operand)].count == 0;
  const bool works = instruction.op == EngineOp::kWork || instruction.op == EngineOp::kSegment;
  timeline_->begin_ns[static_cast<std::size_t>(stream.head)].value =
      works && !empty && !others ? stream.started_ns : now_ns;
}

inline EngineResult StepAccount::Take(std::int64_t end_ns) {
  result_.end_ns.value = end_ns;
  result_.host_work_ns = step_.host_work_ns;
  if (activities_) {
    Nanoseconds active;
    for (const Nanoseconds time : result_.activity_ns) active += time;
    // Behind the last work of the device the host may still be busy.
    result_.activity_ns.back() += result_.end_ns - active;
  }
  return std::move(result_);
}

inline void StepAccount::BeginSpan(std::size_t s, StreamState& stream, std::int64_t start_ns) {
  stream.span = static_cast<std::int32_t>(timeline_->spans.size());
  stream.last_span = stream.span;
  timeline_->spans.push_back({stream.head, static_cast<std::int8_t>(s), {start_ns}, {start_ns}});
  for (const std::int32_t recorded : stream.arrivals) timeline_->flows.push_back({recorded, stream.span});
  stream.arrivals.clear();
}

}  // namespace shardplan::internal
