// SPDX-License-Identifier: Apache-2.0
// StepRecorder: when the instructions of a rank's steps begin and end, on the host and in their streams, and
// what is allocated meanwhile.
//
//   StepRecorder recorder(plan, {.warmup = 1, .steps = 3});
//   replayer->SetRecorder(&recorder);             // between two steps; null again: nothing is recorded
//   ...                                           // training; more steps than these are not recorded
//   Result<Recording> recording = recorder.Finish();
//
// [Note: what a span is of]
//
//   host      |copy_in|all_gather|wait|..model..                a call takes as long as the host is in it
//   stream 1  ........[copy_in  ][ all_gather      ]            its work, from the moment the stream can
//   begin it stream 0  ...............................[ model      ]     up to the host's next trigger
//
// An instruction without work in a stream (allocate, free, bind, record, wait) has times of the host alone. A
// compute instruction of a model that runs itself is what the stream does until the host comes to the next
// trigger, and so is an optimizer's step, until EndSegment if that comes first. Instructions that share a
// span (collectives launched as one, segments of one trigger) have the same number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"

namespace shardplan::executor {

struct Op;

struct RecorderOptions {
  std::int64_t warmup = 1;  // steps that pass before the first one is recorded
  std::int64_t steps = 3;   // to record
  // Steps that are recorded alternate with as many that are not: the difference is what recording costs.
  bool compares = true;
  // The count of the device. Null: the plan's own buffers stand for all.
  std::shared_ptr<AllocationCount> allocations = nullptr;
};

// Times are of the host's steady clock.
struct RecordedInstruction {
  std::int32_t trigger = 0;      // index in the step
  std::int32_t instruction = 0;  // index in the trigger
  std::int64_t host_begin_ns = 0;
  std::int64_t host_end_ns = 0;
  SpanId span = -1;  // -1: it has no work in a stream
  SpanTimes work;
  Bytes allocated_bytes;  // when the host has issued it
};

struct MeasuredStep {
  std::int64_t begin_ns = 0;  // the host's first trigger of it
  std::int64_t end_ns = 0;    // ... of the next step
  SpanTimes on_device;        // when the compute stream comes to them: the host may be far ahead
  Bytes peak_bytes;
  std::int32_t peak_trigger = 0;                // in which, or behind which, the peak is reached
  std::vector<CategoryBytes> peak_by_category;  // of the plan's buffers then, by name of the role
  Bytes steady_bytes;                           // at its end
  std::vector<RecordedInstruction> instructions;
};

struct Recording {
  std::vector<MeasuredStep> steps;                // steady ones
  std::vector<std::int64_t> unrecorded_steps_ns;  // steps between them, in the compute stream
  std::int64_t abandoned = 0;  // steps that left the plan, or were given up, while recorded
};

// Facts of the device of a recording.
struct DeviceFacts {
  std::string name = "CPU";
  Bytes memory_bytes;               // that it has; 0: unknown
  Bytes reserved_bytes;             // the most that the caching allocator has reserved so far
  std::int64_t cache_releases = 0;  // how often it has released its cache to find memory
};

// The recording of a rank as a document, shardplan.recording/1, which `shardplan import-profile` reads beside
// the plan. cache_releases: while it was made.
std::string ToJson(const Recording& recording, const Plan& plan, std::int64_t rank, const DeviceFacts& facts);

class StepRecorder {
 public:
  // `plan` outlives this.
  StepRecorder(const Plan& plan, RecorderOptions options);
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  std::int64_t recorded() const { return std::ssize(steps_); }  // steps, whole ones
  // Whether all steps are recorded that were asked for, and those between them have passed.
  bool done() const;
  // A step under way is not in it. Nothing is recorded from now on.
  Result<Recording> Finish();
  // The end of an optimizer's step, which nothing of the plan marks.
  Status EndSegment();
  // The open step ends here, where nothing follows it: behind its last trigger.
  void EndStep();

  // ---- from the replayer ----
  // Whoever runs the plan on the device. `model_runs_itself`: as Model::RunsItself.
  Status Attach(Device& device, const Collectives& collectives, std::int64_t spans_of_step,
                bool model_runs_itself);
  // A step begins. True: it is recorded; BufferIs is then called for every buffer that is alive.
  bool BeginStep(std::int32_t step);
  void AbandonStep();
  Status BeginTrigger(std::int32_t trigger);
  Status EndTrigger();
  Status BeforeInstruction(std::int32_t instruction, const Op& op);
  Status AfterInstruction(const Op& op);
  void BufferIs(BufferId buffer, Bytes bytes);

 private:
  struct Allocated;
  void Look();
  Status BeginSpan(SpanId span, StreamId stream);
  Status EndSpan(SpanId span, StreamId stream);
  std::int64_t StepsInAll() const { return options_.steps * (options_.compares ? 2 : 1); }
  bool Records(std::int64_t step) const { return !options_.compares || step % 2 == 0; }
  SpanId MarkOf(std::int64_t step, int end) const;
  Status MarkStep(int end);
  Result<SpanTimes> OnDevice(std::int64_t step);

  const Plan& plan_;
  const RecorderOptions options_;
  Device* device_ = nullptr;
  bool launches_groups_ = false;
  bool model_runs_itself_ = false;
  std::int64_t warmup_left_;
  bool finished_ = false;
  std::vector<MeasuredStep> steps_;
  std::int64_t ended_steps_ = 0;  // recorded or passed by
  std::int64_t abandoned_ = 0;

  enum class Open : std::uint8_t { kNothing, kRecorded, kUnrecorded };
  Open open_ = Open::kNothing;  // the step under way
  MeasuredStep step_;
  std::int64_t spans_of_step_ = 0;
  SpanId next_span_ = 0;
  std::vector<SpanId> ended_;  // by stream: the span behind whose end nothing was issued; -1: unknown
  bool in_group_ = false;
  bool in_segment_ = false;
  bool knows_buffers_ = false;         // all that are alive
  std::vector<std::size_t> deferred_;  // instructions of the trigger that the model runs behind it
  TriggerKind trigger_kind_ = TriggerKind::kStepBegin;
  std::int32_t trigger_ = 0;
  std::unique_ptr<Allocated> allocated_;
};

}  // namespace shardplan::executor
