// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/step_recorder.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "replay/program.h"

namespace shardplan::executor {
namespace {

Status NoClock() {
  return MakeError(ErrorCode::kUsage, "this device has no clock: no times can be recorded");
}

// Whether a stream is told something by an operation without work that takes time.
bool IssuesToStreams(const Op& op) {
  switch (op.code) {
    case OpCode::kNothing:
    case OpCode::kAllocate:
    case OpCode::kFree:
    case OpCode::kBindUnsharded:
    case OpCode::kBindSharded:
    case OpCode::kRecord:
      return false;
    default:
      return true;
  }
}

constexpr std::size_t kRoles = kBufferRoles;

}  // namespace

std::int64_t SteadyNanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

Status Device::PrepareSpans(std::int64_t) { return NoClock(); }
Status Device::BeginSpan(SpanId, StreamId) { return NoClock(); }
Status Device::ContinueSpan(SpanId span, SpanId, StreamId stream) { return BeginSpan(span, stream); }
Status Device::EndSpan(SpanId, StreamId) { return NoClock(); }
Result<SpanTimes> Device::TimesOf(SpanId) { return std::unexpected(NoClock().error()); }

bool HasWork(const Op& op) {
  switch (op.code) {
    case OpCode::kCompute:
    case OpCode::kCopy:
    case OpCode::kGradCast:
    case OpCode::kAccumulate:
    case OpCode::kCollective:
    case OpCode::kScale:
    case OpCode::kOptimizerStep:
    case OpCode::kUpdate:
      return true;
    default:
      return false;
  }
}

// The plan's buffers in device memory.
struct StepRecorder::Allocated {
  std::vector<Bytes> of_buffer;
  std::array<std::int64_t, kRoles> of_role{};
  Bytes buffers;  // all of them
  std::array<std::int64_t, kRoles> at_peak{};
};

StepRecorder::StepRecorder(const Plan& plan, RecorderOptions options)
    : plan_(plan),
      options_(std::move(options)),
      warmup_left_(options_.warmup),
      allocated_(std::make_unique<Allocated>()) {}

StepRecorder::~StepRecorder() = default;

Status StepRecorder::Attach(Device& device, const Collectives& collectives, std::int64_t spans_of_step,
                            bool model_runs_itself) {
  device_ = &device;
  launches_groups_ = collectives.LaunchesGroups();
  model_runs_itself_ = model_runs_itself;
  spans_of_step_ = spans_of_step;
  return device.PrepareSpans(MarkOf(StepsInAll(), 0));
}

// Behind the spans of the instructions: one at the begin (0) and one at the end (1) of each step.
SpanId StepRecorder::MarkOf(std::int64_t step, int end) const {
  return static_cast<SpanId>(spans_of_step_ * options_.steps + 2 * step + end);
}

// Marks the open step.
Status StepRecorder::MarkStep(int end) {
  const SpanId span = MarkOf(ended_steps_, end);
  if (Status status = device_->BeginSpan(span, 0); !status) return status;
  return device_->EndSpan(span, 0);
}

Result<SpanTimes> StepRecorder::OnDevice(std::int64_t step) {
  SpanTimes both;
  for (const int end : {0, 1}) {
    const Result<SpanTimes> mark = device_->TimesOf(MarkOf(step, end));
    if (!mark) return std::unexpected(mark.error());
    (end == 0 ? both.begin_ns : both.end_ns) = mark->begin_ns;
  }
  return both;
}

bool StepRecorder::done() const { return finished_ || ended_steps_ >= StepsInAll(); }

bool StepRecorder::BeginStep(std::int32_t step) {
  EndStep();
  if (done()) return false;
  if (warmup_left_ > 0) {
    --warmup_left_;
    return false;
  }
  if (step != plan_.steady_step) return false;
  const bool records = Records(ended_steps_);
  step_ = {};
  step_.begin_ns = SteadyNanoseconds();
  if (!MarkStep(0)) return false;
  open_ = records ? Open::kRecorded : Open::kUnrecorded;
  if (!records) return false;
  next_span_ = static_cast<SpanId>(recorded() * spans_of_step_);
  in_group_ = in_segment_ = knows_buffers_ = false;
  ended_.assign(plan_.streams.size(), -1);
  deferred_.clear();
  *allocated_ = {};
  allocated_->of_buffer.resize(plan_.buffers.size());
  if (options_.allocations) (void)options_.allocations->TakePeak();
  return true;
}

void StepRecorder::EndStep() {
  if (open_ == Open::kNothing) return;
  const bool recorded = open_ == Open::kRecorded;
  if (recorded) (void)EndSegment();
  if (!MarkStep(1)) {
    AbandonStep();
    return;
  }
  ++ended_steps_;
  if (recorded) {
    Look();
    step_.end_ns = SteadyNanoseconds();
    step_.steady_bytes = options_.allocations ? options_.allocations->now() : allocated_->buffers;
    for (std::size_t role = 0; role < kRoles; ++role) {
      const std::int64_t bytes = allocated_->at_peak[role];
      if (bytes == 0) continue;
      step_.peak_by_category.push_back({std::string(Name(static_cast<BufferRole>(role))), {bytes}});
    }
    std::ranges::sort(step_.peak_by_category, {}, &CategoryBytes::category);
    steps_.push_back(std::move(step_));
  }
  open_ = Open::kNothing;
}

void StepRecorder::AbandonStep() {
  if (open_ == Open::kRecorded) ++abandoned_;
  open_ = Open::kNothing;
}

// The highest since the last look is of the buffers that were alive then: it is looked at before each change.
void StepRecorder::Look() {
  const Bytes most = options_.allocations ? options_.allocations->TakePeak() : allocated_->buffers;
  if (most <= step_.peak_bytes) return;
  step_.peak_bytes = most;
  step_.peak_trigger = trigger_;
  allocated_->at_peak = allocated_->of_role;
}

void StepRecorder::BufferIs(BufferId buffer, Bytes bytes) {
  if (plan_.buffers[buffer].memory != MemoryKind::kDevice) return;
  if (knows_buffers_) Look();
  Bytes& known = allocated_->of_buffer[buffer];
  const std::int64_t more = bytes.value - known.value;
  known = bytes;
  allocated_->buffers.value += more;
  allocated_->of_role[static_cast<std::size_t>(plan_.buffers[buffer].role)] += more;
}

Status StepRecorder::EndSegment() {
  if (open_ != Open::kRecorded || !std::exchange(in_segment_, false)) return {};
  return EndSpan(next_span_ - 1, 0);
}

// The host's own work (stream -1) is in no stream.
Status StepRecorder::BeginSpan(SpanId span, StreamId stream) {
  if (stream < 0 || static_cast<std::size_t>(stream) >= ended_.size() || ended_[stream] < 0)
    return device_->BeginSpan(span, stream);
  return device_->ContinueSpan(span, std::exchange(ended_[stream], -1), stream);
}

Status StepRecorder::EndSpan(SpanId span, StreamId stream) {
  if (stream >= 0 && static_cast<std::size_t>(stream) < ended_.size()) ended_[stream] = span;
  return device_->EndSpan(span, stream);
}

Status StepRecorder::BeginTrigger(std::int32_t trigger) {
  knows_buffers_ = true;
  std::ranges::fill(ended_, -1);  // whoever trains may have done anything since
  if (Status status = EndSegment(); !status) return status;
  Look();
  trigger_ = trigger;
  trigger_kind_ = plan_.steps[plan_.steady_step].triggers[trigger].kind;
  return {};
}

// The segments of a model that runs itself begin where the trigger ends.
Status StepRecorder::EndTrigger() {
  if (deferred_.empty()) return {};
  for (const std::size_t instruction : deferred_) step_.instructions[instruction].span = next_span_;
  deferred_.clear();
  in_segment_ = true;
  return BeginSpan(next_span_++, 0);
}

Status StepRecorder::BeforeInstruction(std::int32_t instruction, const Op& op) {
  Look();
  RecordedInstruction recorded = {.trigger = trigger_, .instruction = instruction};
  recorded.host_begin_ns = SteadyNanoseconds();
  const bool in_group = in_group_;
  const bool deferred = model_runs_itself_ &&
                        (op.code == OpCode::kCompute ||
                         (op.code == OpCode::kOptimizerStep && trigger_kind_ == TriggerKind::kOptimizerStep));
  if (deferred) {
    deferred_.push_back(step_.instructions.size());
  } else if (in_group) {
    recorded.span = next_span_ - 1;
  } else if (HasWork(op)) {
    recorded.span = next_span_++;
    in_group_ = launches_groups_ && op.begins_group;
  }
  step_.instructions.push_back(recorded);
  if (recorded.span < 0 && IssuesToStreams(op)) std::ranges::fill(ended_, -1);
  return recorded.span < 0 || in_group ? Status() : BeginSpan(recorded.span, op.stream);
}

Status StepRecorder::AfterInstruction(const Op& op) {
  RecordedInstruction& recorded = step_.instructions.back();
  Status status;
  if (recorded.span >= 0) {  // not the model's own, which comes later
    if (in_group_ && op.ends_group) in_group_ = false;
    if (!in_group_) status = EndSpan(recorded.span, op.stream);
  }
  recorded.host_end_ns = SteadyNanoseconds();
  Look();
  recorded.allocated_bytes = options_.allocations ? options_.allocations->now() : allocated_->buffers;
  return status;
}

Result<Recording> StepRecorder::Finish() {
  open_ = Open::kNothing;
  finished_ = true;
  Recording recording{.steps = std::move(steps_), .unrecorded_steps_ns = {}, .abandoned = abandoned_};
  std::size_t next = 0;
  // In the order of time, as the device's clock wants them.
  for (std::int64_t ended = 0; ended < ended_steps_; ++ended) {
    const Result<SpanTimes> on_device = OnDevice(ended);
    if (!on_device) return std::unexpected(on_device.error());
    if (!Records(ended)) {
      recording.unrecorded_steps_ns.push_back(on_device->end_ns - on_device->begin_ns);
      continue;
    }
    MeasuredStep& step = recording.steps[next++];
    step.on_device = *on_device;
    const RecordedInstruction* sharer = nullptr;  // the last one that has a span
    for (RecordedInstruction& instruction : step.instructions) {
      if (instruction.span < 0) continue;
      if (sharer != nullptr && sharer->span == instruction.span) {
        instruction.work = sharer->work;
        continue;
      }
      Result<SpanTimes> times = device_->TimesOf(instruction.span);
      if (!times) return std::unexpected(std::move(times.error()));
      instruction.work = *times;
      sharer = &instruction;
    }
  }
  return recording;
}

}  // namespace shardplan::executor
