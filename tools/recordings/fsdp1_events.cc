#include <fmt/format.h>

#include <algorithm>

#include "events.h"

namespace shardplan::conformance {
namespace {

// [Note: what a log line is in a plan]
// An unshard ends with bind_unsharded; without an all-gather before it, it was an unshard_noop (after which
// the runtime frees a low-precision shard that is not there). bind_sharded is a reshard; a free behind it
// makes it free=true. wait_unshard is the compute stream's wait for an event of the unshard stream.
class Writer {
 public:
  Writer(const Recording& recording, const Plan& plan)
      : recording_(recording), plan_(plan), reduced_(false), ran_pre_backward_(plan.units.size(), false) {}

  std::vector<LogEvent> Run() {
    for (step_ = 0; step_ < recording_.steps; ++step_) {
      for (const Trigger& trigger : StepAt(plan_, step_).triggers) OnTrigger(trigger);
    }
    return std::move(events_);
  }

 private:
  std::string UnitName(UnitId unit) const {
    return unit < 0 || plan_.units[unit].fqn.empty() ? "(root)" : plan_.units[unit].fqn;
  }

  LogEvent& Add(std::string op, UnitId unit) {
    events_.push_back({{{"step", std::to_string(step_)},
                        {"phase", phase_},
                        {"op", std::move(op)},
                        {"unit", UnitName(unit)}}});
    return events_.back();
  }

  void OnTrigger(const Trigger& trigger) {
    const bool has_handle = trigger.unit >= 0 && !plan_.units[trigger.unit].parameters.empty();
    bool accumulates = false;
    switch (trigger.kind) {
      case TriggerKind::kPreForward:
      case TriggerKind::kPostForward:
        phase_ = "forward";
        if (has_handle)
          Add(trigger.kind == TriggerKind::kPreForward ? "pre_forward" : "post_forward", trigger.unit);
        if (has_handle) ran_pre_backward_[trigger.unit] = false;
        break;
      case TriggerKind::kPreBackward:
        phase_ = "backward";
        if (has_handle && !ran_pre_backward_[trigger.unit]) {
          Add("pre_backward", trigger.unit);
          ran_pre_backward_[trigger.unit] = true;
        }
        break;
      case TriggerKind::kPostBackward: {
        phase_ = "backward";
        const bool frozen = std::none_of(plan_.units[trigger.unit].parameters.begin(),
                                         plan_.units[trigger.unit].parameters.end(),
                                         [](const UnitParameter& p) { return p.requires_grad; });
        Add(frozen ? "post_backward_reshard_only" : "post_backward", trigger.unit);
        accumulates = !frozen;
        break;
      }
      case TriggerKind::kBackwardEnd:
        phase_ = "backward";
        Add("finalize", -1);
        std::fill(ran_pre_backward_.begin(), ran_pre_backward_.end(), false);
        break;
      case TriggerKind::kOptimizerStep:
      case TriggerKind::kZeroGrad:
        phase_ = "optim";
        Add(trigger.kind == TriggerKind::kOptimizerStep ? "optim_step" : "zero_grad", -1);
        break;
      default:
        break;
    }
    reduced_ = false;
    const Instruction* previous = nullptr;
    for (const Instruction& instruction : trigger.instructions) {
      if (instruction.kind == InstructionKind::kCompute && accumulates && !reduced_) {
        Accumulate(trigger.unit);
        accumulates = false;
      }
      OnInstruction(instruction, previous);
      previous = &instruction;
    }
    if (accumulates && !reduced_) Accumulate(trigger.unit);
  }

  void Accumulate(UnitId unit) {
    for (const Buffer& buffer : plan_.buffers) {
      if (buffer.unit != unit || buffer.role != BufferRole::kGradUnshardedAccumulated) continue;
      AddSize(Add("accumulate", unit), buffer);
      return;
    }
  }

  static void AddSize(LogEvent& event, const Buffer& buffer) {
    event.keys["bytes"] = std::to_string(SizeBytes(buffer).value);
    event.keys["dtype"] = Name(buffer.dtype);
  }

  LogEvent& AddCollective(std::string op, const Buffer& buffer, const Instruction& i, std::string group) {
    LogEvent& event = Add(std::move(op), buffer.unit);
    AddSize(event, buffer);
    event.keys["group"] = std::move(group);
    event.keys["ranks"] = std::to_string(plan_.communicators[i.communicator].size);
    return event;
  }

  void MarkPrefetch(LogEvent& event, const Instruction& i) {
    if (i.reason.starts_with("prefetch")) event.keys["prefetch"] = "true";
  }

  bool IsLowPrecision(BufferId id) const {
    const Buffer& buffer = plan_.buffers[id];
    return buffer.role == BufferRole::kAllGatherInput ||
           (buffer.role == BufferRole::kParamUnsharded && plan_.units[buffer.unit].shard_communicator < 0);
  }

  void OnInstruction(const Instruction& i, const Instruction* previous) {
    switch (i.kind) {
      case InstructionKind::kAllocate:
        if (IsLowPrecision(i.dst)) {
          LogEvent& event = Add("mp_shard_alloc", i.unit);
          AddSize(event, plan_.buffers[i.dst]);
        }
        break;
      case InstructionKind::kFree:
        OnFree(i);
        break;
      case InstructionKind::kHostWait:
        MarkPrefetch(Add("rate_limit_wait", i.unit), i);
        break;
      case InstructionKind::kAllGather:
        MarkPrefetch(AddCollective("all_gather", plan_.buffers[i.dst], i, "shard"), i);
        break;
      case InstructionKind::kBindUnsharded:
        if (previous == nullptr || previous->kind != InstructionKind::kAllGather) OnNoop(i);
        break;
      case InstructionKind::kBindSharded:
        Add("reshard", i.unit).keys["free"] = "false";
        break;
      case InstructionKind::kWait:
        if (i.stream == 0 && plan_.events[i.event].ends_with(".unshard")) Add("wait_unshard", i.unit);
        break;
      case InstructionKind::kReduceScatter:
        AddCollective("reduce_scatter", plan_.buffers[i.src], i, "shard");
        reduced_ = true;
        break;
      case InstructionKind::kAllReduce:
        AddCollective("all_reduce", plan_.buffers[i.src], i, "replicate");
        reduced_ = true;
        break;
      case InstructionKind::kGradAccumulate:
        if (plan_.buffers[i.dst].role == BufferRole::kGradSharded) {
          AddSize(Add("accumulate_sharded", i.unit), plan_.buffers[i.dst]);
        }
        break;
      default:
        break;
    }
  }

  void OnNoop(const Instruction& i) {
    MarkPrefetch(Add("unshard_noop", i.unit), i);
    const Unit& unit = plan_.units[i.unit];
    if (unit.param_dtype == unit.orig_dtype || unit.shard_communicator < 0) return;
    LogEvent& event = Add("mp_shard_free", i.unit);
    for (const Buffer& buffer : plan_.buffers) {
      if (buffer.unit == i.unit && buffer.role == BufferRole::kAllGatherInput) AddSize(event, buffer);
    }
    event.keys["free"] = "false";
  }

  void OnFree(const Instruction& i) {
    const Buffer& buffer = plan_.buffers[i.src];
    if (IsLowPrecision(i.src)) {
      AddSize(Add("mp_shard_free", buffer.unit), buffer);
    } else if (buffer.role == BufferRole::kParamUnsharded) {
      LogEvent& event = events_.back();
      event.keys["free"] = "true";
      event.keys["freed_bytes"] = std::to_string(SizeBytes(buffer).value);
    }
  }

  const Recording& recording_;
  const Plan& plan_;
  std::vector<LogEvent> events_;
  std::int32_t step_ = 0;
  std::string phase_ = "forward";
  bool reduced_ = false;
  std::vector<bool> ran_pre_backward_;
};

}  // namespace

std::vector<LogEvent> Fsdp1Events(const Recording& recording, const Plan& plan) {
  return Writer(recording, plan).Run();
}

}  // namespace shardplan::conformance
