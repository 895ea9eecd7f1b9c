// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "events.h"
#include "fsdp1_host_gradients.h"

namespace shardplan::conformance {
namespace {

// [Note: what a log line is in a plan]
// An unshard ends with bind_unsharded; without an all-gather before it, it was an unshard_noop (after which
// the runtime frees a low-precision shard that is not there). bind_sharded is a reshard; a free behind it
// makes it free=true. wait_unshard is the compute stream's wait for an event of the unshard stream. The
// recordings are of ranks on a CPU: copies between host and device are not in them, and gradients in host
// memory are added to (fsdp1_host_gradients.h).
class Fsdp1EventWriter {
 public:
  Fsdp1EventWriter(const Recording& recording, const Plan& plan)
      : recording_(recording),
        plan_(plan),
        ran_pre_backward_(plan.units.size(), false),
        in_pre_backward_(plan.units.size(), false),
        resharded_(plan.units.size(), false),
        host_gradients_(plan) {}

  std::vector<LogEvent> Run() {
    for (step_ = 0; step_ < recording_.steps; ++step_) {
      forwards_ = 0;
      for (const Trigger& trigger : StepAt(plan_, step_).triggers) OnTrigger(trigger);
    }
    return std::move(events_);
  }

 private:
  std::string UnitName(UnitId unit) const { return DisplayName(unit < 0 ? "" : plan_.units[unit].fqn); }

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
        OnForwardHook(trigger, has_handle);
        break;
      case TriggerKind::kPreBackward:
        phase_ = "backward";
        if (plan_.units[trigger.unit].fqn.empty()) host_gradients_.RootPreForward();
        if (has_handle && !ran_pre_backward_[trigger.unit]) {
          Add("pre_backward", trigger.unit);
          ran_pre_backward_[trigger.unit] = in_pre_backward_[trigger.unit] = true;
        }
        break;
      case TriggerKind::kPostBackward: {
        phase_ = "backward";
        in_pre_backward_[trigger.unit] = false;
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
        std::fill(in_pre_backward_.begin(), in_pre_backward_.end(), false);
        break;
      case TriggerKind::kOptimizerStep:
      case TriggerKind::kZeroGrad:
        phase_ = "optim";
        Add(trigger.kind == TriggerKind::kOptimizerStep ? "optim_step" : "zero_grad", -1);
        if (trigger.kind == TriggerKind::kZeroGrad) host_gradients_.ZeroGrad();
        break;
      case TriggerKind::kUserCall:
        phase_ = "forward";
        break;
      default:
        break;
    }
    trigger_ = trigger.kind;
    reduced_ = false;
    for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
      const Instruction& instruction = trigger.instructions[i];
      if (instruction.kind == InstructionKind::kCompute && accumulates && !reduced_) {
        Accumulate(trigger.unit);
        accumulates = false;
      }
      OnInstruction(instruction, i > 0 ? &trigger.instructions[i - 1] : nullptr,
                    i + 1 < trigger.instructions.size() ? &trigger.instructions[i + 1] : nullptr);
    }
    if (accumulates && !reduced_) Accumulate(trigger.unit);
    if (trigger.kind == TriggerKind::kPreBackward) host_gradients_.PreBackward(trigger.unit);
    if (trigger.kind == TriggerKind::kBackwardEnd) {
      host_gradients_.BackwardEnd(std::ranges::any_of(
          trigger.instructions, [](const Instruction& i) { return i.kind == InstructionKind::kWait; }));
      phase_ = "forward";
    }
  }

  // A recomputation passes forward hooks inside the backward. They do nothing where the unit's own backward
  // has begun.
  void OnForwardHook(const Trigger& trigger, bool has_handle) {
    const bool enters = trigger.kind == TriggerKind::kPreForward;
    if (phase_ != "backward") phase_ = "forward";
    if (enters && phase_ == "forward" && plan_.units[trigger.unit].fqn.empty()) BeginForward();
    if (!has_handle || in_pre_backward_[trigger.unit]) return;
    Add(enters ? "pre_forward" : "post_forward", trigger.unit);
    ran_pre_backward_[trigger.unit] = false;
  }

  void BeginForward() {
    host_gradients_.RootPreForward();
    const std::vector<StepProgram>& program = recording_.strategy.program;
    grad_enabled_ = training_ = true;
    if (program.empty()) return;
    std::int32_t forward = forwards_++;
    for (const ProgramCall& call : program[std::min<std::size_t>(step_, program.size() - 1)]) {
      const auto* called = std::get_if<ForwardCall>(&call);
      if (called == nullptr || forward-- > 0) continue;
      grad_enabled_ = recording_.trace.forwards[called->trace].grad_enabled;
      training_ = called->training.value_or(grad_enabled_);
      return;
    }
  }

  bool ForcesFullPrecision() const { return plan_.strategy.fsdp1.full_precision_in_eval && !training_; }

  void Accumulate(UnitId unit) {
    host_gradients_.Accumulate(unit);
    if (gradient_ >= 0) AddSize(Add("accumulate", unit), plan_.buffers[gradient_]);
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
    if (i.reason.str().starts_with("prefetch")) event.keys["prefetch"] = "true";
  }

  bool IsLowPrecision(BufferId id) const {
    const Buffer& buffer = plan_.buffers[id];
    if (buffer.unit < 0 || buffer.dtype == plan_.units[buffer.unit].orig_dtype) return false;
    return buffer.role == BufferRole::kAllGatherInput ||
           (buffer.role == BufferRole::kParamUnsharded && plan_.units[buffer.unit].shard_communicator < 0);
  }

  // Right behind the record of its event it is a stream's synchronize(), which logs have of offloaded
  // gradients only; else the rate limiter waits for what was freed earlier.
  void OnHostWait(const Instruction& i, const Instruction* previous) {
    const bool synchronizes =
        previous != nullptr && previous->kind == InstructionKind::kRecord && previous->event == i.event;
    if (!synchronizes) {
      MarkPrefetch(Add("rate_limit_wait", i.unit), i);
    } else if (trigger_ == TriggerKind::kBackwardEnd) {
      Add("stream_synchronize", -1);
    }
  }

  void OnInstruction(const Instruction& i, const Instruction* previous, const Instruction* next) {
    switch (i.kind) {
      case InstructionKind::kCopyIn:  // into memory that may be there already
        if (IsLowPrecision(i.dst)) {
          LogEvent& event = Add("mp_shard_alloc", i.unit);
          AddSize(event, plan_.buffers[i.dst]);
        }
        break;
      case InstructionKind::kFree:
        if (trigger_ != TriggerKind::kLazyInit) OnFree(i);
        break;
      case InstructionKind::kHostWait:
        OnHostWait(i, previous);
        break;
      case InstructionKind::kAllGather:
        if (plan_.buffers[i.dst].role == BufferRole::kOrderCheck) {
          AddCollective("order_check", plan_.buffers[i.dst], i, "shard");
          break;
        }
        MarkPrefetch(AddCollective("all_gather", plan_.buffers[i.dst], i, "shard"), i);
        break;
      case InstructionKind::kBindUnsharded:
        host_gradients_.Unshard(i.unit);
        if (previous == nullptr || previous->kind != InstructionKind::kAllGather) {
          MarkPrefetch(Add("unshard_noop", i.unit), i);
        }
        if (plan_.units[i.unit].shard_communicator >= 0 &&
            (next == nullptr || next->kind != InstructionKind::kFree || !IsLowPrecision(next->src))) {
          FreeNothing(i.unit);
        }
        break;
      case InstructionKind::kBindSharded:
        if (trigger_ == TriggerKind::kBackwardEnd && StaysOnHost(i)) break;
        resharded_[i.unit] = true;
        Add("reshard", i.unit).keys["free"] = "false";
        host_gradients_.Reshard(i.unit, trigger_ == TriggerKind::kPostForward, grad_enabled_);
        // post_reshard frees what the modules used without sharding, also where there is nothing.
        if (plan_.units[i.unit].shard_communicator < 0 && !ForcesFullPrecision() &&
            (next == nullptr || next->kind != InstructionKind::kFree || !IsLowPrecision(next->src))) {
          FreeNothing(i.unit);
        }
        break;
      case InstructionKind::kWait:
        if (i.stream == 0 && plan_.events[i.event].ends_with(".unshard")) Add("wait_unshard", i.unit);
        break;
      case InstructionKind::kReduceScatter:
        AddCollective("reduce_scatter", plan_.buffers[i.src], i, "shard");
        host_gradients_.Reduce(i.unit);
        reduced_ = true;
        break;
      case InstructionKind::kAllReduce:
        AddCollective("all_reduce", plan_.buffers[i.src], i, "replicate");
        if (plan_.buffers[i.src].role == BufferRole::kOrderCheck) {  // summon_full_params, before gradients
          events_.back().keys["unit"] = UnitName(i.unit);
          break;
        }
        reduced_ = true;
        break;
      case InstructionKind::kGradCopyIn:
        gradient_ = i.dst;
        break;
      case InstructionKind::kGradAccumulate:
        gradient_ = i.dst;
        // NO_SHARD: the gradient that is there is the unsharded one, which autograd adds to.
        if (plan_.buffers[i.dst].role == BufferRole::kGradSharded &&
            plan_.units[i.unit].shard_communicator >= 0 && host_gradients_.AddsReduced(i.unit)) {
          AddSize(Add("accumulate_sharded", i.unit), plan_.buffers[i.dst]);
        }
        break;
      case InstructionKind::kCopyToHost:
        OnOffload(i);
        break;
      case InstructionKind::kZeroGrad:
        if (i.unit >= 0) host_gradients_.StepInBackward(i.unit);
        break;
      case InstructionKind::kUpdateCopyIn:
      case InstructionKind::kAllToAll:
      case InstructionKind::kUpdateGather:
      case InstructionKind::kOrthogonalize:
      case InstructionKind::kUpdateApply:
      case InstructionKind::kOptimizerStep:
        if (i.parameter >= 0 &&
            HoldsPiece(plan_, plan_.units[i.unit], plan_.units[i.unit].parameters[i.parameter])) {
          Add("optim_in_backward", i.unit).keys["param"] = plan_.units[i.unit].parameters[i.parameter].fqn;
        }
        break;
      case InstructionKind::kCompute:
      case InstructionKind::kAllocate:
      case InstructionKind::kCopyOut:
      case InstructionKind::kReshardPostForward:
      case InstructionKind::kGradScale:
      case InstructionKind::kGradZero:
      case InstructionKind::kGradCast:
      case InstructionKind::kCopyToDevice:
      case InstructionKind::kRecord:
        break;
    }
  }

  // On a CPU an offloaded parameter that is neither sharded nor cast is its own shard while it is used: the
  // catch-all finds it resharded.
  bool StaysOnHost(const Instruction& i) const {
    const Unit& unit = plan_.units[i.unit];
    return unit.shard_communicator < 0 && plan_.buffers[i.src].memory != MemoryKind::kDevice &&
           unit.param_dtype == unit.orig_dtype && resharded_[i.unit];
  }

  // The runtime frees a low-precision shard, also where there is none.
  void FreeNothing(UnitId id) {
    const Unit& unit = plan_.units[id];
    if (unit.param_dtype == unit.orig_dtype) return;
    LogEvent& event = Add("mp_shard_free", id);
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].unit == id && IsLowPrecision(static_cast<BufferId>(b))) {
        AddSize(event, plan_.buffers[b]);
      }
    }
    event.keys["free"] = "false";
  }

  void OnOffload(const Instruction& i) {
    const Buffer& gradient = plan_.buffers[i.src];
    if (gradient.role != BufferRole::kGradSharded) return;
    if (host_gradients_.Offload(i.unit)) AddSize(Add("accumulate_sharded", i.unit), plan_.buffers[i.dst]);
    AddSize(Add("offload_grad", i.unit), gradient);
  }

  void OnFree(const Instruction& i) {
    const Buffer& buffer = plan_.buffers[i.src];
    if (IsLowPrecision(i.src)) {
      AddSize(Add("mp_shard_free", buffer.unit), buffer);
    } else if (buffer.role == BufferRole::kParamUnsharded &&
               plan_.units[buffer.unit].shard_communicator >= 0 && events_.back().At("op") == "reshard") {
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
  TriggerKind trigger_ = TriggerKind::kStepBegin;
  bool reduced_ = false;
  BufferId gradient_ = -1;     // where autograd has put the flat gradient of the trigger
  bool grad_enabled_ = true;   // of the forward that runs
  bool training_ = true;       // mode of the modules in it
  std::int32_t forwards_ = 0;  // of the step, so far
  std::vector<bool> ran_pre_backward_;
  std::vector<bool> in_pre_backward_;  // the handle's training state is BACKWARD_PRE
  std::vector<bool> resharded_;        // at least once
  HostGradients host_gradients_;
};

}  // namespace

std::vector<LogEvent> Fsdp1Events(const Recording& recording, const Plan& plan) {
  return Fsdp1EventWriter(recording, plan).Run();
}

}  // namespace shardplan::conformance
