// SPDX-License-Identifier: Apache-2.0
// Writes the plan's program: policies call it in the order in which the host issues things. The planner makes
// one for each plan.
//
// A call that makes no sense (an id that nobody gave, an instruction before the first trigger) is refused:
// the first of them ends planning with an error that says it. The result of such a call may be used and means
// nothing.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "shardplan/planner/hook_points.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/program.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

struct Partition;  // the planner's own: Plan::units has what a policy needs of it

// The stream of the model's compute: streams[0] of every plan.
inline constexpr StreamId kCompute = 0;
inline constexpr StreamId kHost = -1;  // on no stream

class ProgramBuilder {
 public:
  ProgramBuilder(const Trace& trace, const Partition& partition, Plan& plan);

  // Steps are the planner's to begin.
  void BeginStep(std::string name);
  // Later instructions are issued at this point of the step. `unit` -1: of no unit.
  void BeginTrigger(TriggerKind kind, UnitId unit, std::int32_t microbatch);
  // Later instructions are a procedure, and after it there are nothing but procedures. Events and buffers
  // that a step may hold between two of its points, and that are no state of a unit, are others than those of
  // the steps.
  void BeginProcedure(ProcedureKind kind, UnitId unit);

  // Names are interned: the same name is the same stream / event / buffer. A buffer of another shape under a
  // known name is another one, whose name gets a number. `priority` as torch.cuda.Stream's: -1 is higher.
  StreamId Stream(std::string_view name, std::int32_t priority = 0);
  EventId Event(const std::string& name);
  BufferId AddBuffer(Buffer buffer);
  // The buffer of `unit` named "<unit>.<role>[.<suffix>]" over the given parameters (indices into
  // Unit::parameters, ascending). `parts`: bytes of each of its parts on one rank. `pool`: the communicator
  // whose memory it is of; -1: the allocator's.
  BufferId UnitBuffer(UnitId unit, BufferRole role, DType dtype, std::vector<Bytes> parts,
                      std::vector<std::int32_t> parameters, std::string_view suffix = {},
                      MemoryKind memory = MemoryKind::kDevice, CommunicatorId pool = -1);

  // `reason` is put on every instruction until the next call.
  void SetReason(std::string_view reason);
  // The unit that the instructions work on, until the next trigger.
  void SetUnit(UnitId unit) { unit_ = unit; }
  UnitId unit() const { return unit_; }
  const std::string& reason() const { return reason_.str(); }

  // An instruction at the end of the trigger, whose operands the caller fills in
  // (docs/reference/plan-format.md). Valid until the next call.
  Instruction& Emit(InstructionKind kind, StreamId stream);
  void Allocate(BufferId buffer, StreamId stream);
  // `safe_after`: streams whose work so far has to be done before the memory is given to anyone.
  void Free(BufferId buffer, StreamId stream, std::vector<StreamId> safe_after = {});
  void FreeParts(BufferId buffer, StreamId stream, std::vector<std::int32_t> parts);
  Instruction& Move(InstructionKind kind, BufferId src, BufferId dst, StreamId stream);
  void Record(EventId event, StreamId stream);
  void Wait(EventId event, StreamId stream);
  void HostWait(EventId event);
  // torch's waiter.wait_stream(on): an event named `name` recorded on `on`, waited for by `waiter`.
  void WaitStream(StreamId waiter, StreamId on, const std::string& name);

  // Emits the segment of `event` (unless it is empty). `accumulating`, ascending: parameters that already
  // hold an unsharded gradient, whose new one is added and dropped at once. `extra_reads`: units that a trace
  // without operators does not say it reads.
  void Compute(const HookPoint& event, const std::vector<ParameterId>& accumulating,
               const std::vector<UnitId>& extra_reads);

  // Work beside the model's, which AddSegment gives to the plan once and RunSegment runs. Segments have
  // different names.
  SegmentId AddSegment(Segment segment);
  void RunSegment(SegmentId segment);

  // Ends planning with this error, unless an earlier one does.
  void Refuse(std::string message);
  // kBadInput: what was refused.
  const Status& status() const { return status_; }

  // The plan so far: units, communicators and what this builder has added.
  Plan& plan() { return plan_; }

 private:
  struct SegmentKey {
    EventRange range;
    std::vector<ParameterId> accumulating;
    std::vector<UnitId> extra_reads;
    auto operator<=>(const SegmentKey&) const = default;
  };
  std::vector<Instruction>& Instructions();
  void CheckBuffer(BufferId buffer);
  void CheckEvent(EventId event);
  Segment MakeSegment(const HookPoint& event, const SegmentKey& key) const;
  OperatorEvent OnPlansCommunicator(OperatorEvent op) const;
  // Whether a segment that covers the event has something of it.
  bool IsWork(const TraceEvent& event) const;

  const Trace& trace_;
  const Partition& partition_;
  Plan& plan_;
  Status status_;
  std::vector<Instruction> refused_;  // instructions that are issued nowhere
  const bool has_operators_;
  // By forward and by backward of the trace, and position of an event: what is done before it.
  std::vector<std::vector<std::int32_t>> done_in_forwards_, done_in_backwards_;
  SharedText reason_;
  std::map<std::string, SharedText, std::less<>> reasons_;
  InstructionSharing sharing_;
  UnitId unit_ = -1;
  std::map<std::string, StreamId, std::less<>> streams_;
  std::map<std::string, EventId, std::less<>> events_;
  std::map<std::string, BufferId, std::less<>> buffers_;
  std::map<SegmentKey, SegmentId> segments_;
  std::map<std::string, std::int32_t, std::less<>> segment_names_;
  std::map<std::tuple<TriggerKind, UnitId, std::int32_t>, std::int32_t> passed_;  // in this step
};

}  // namespace shardplan
