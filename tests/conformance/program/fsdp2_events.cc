// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "events.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/program.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan::conformance {
namespace {

std::string UnitName(const Unit& unit) { return DisplayName(unit.fqn); }

// [Note: what a log line is in a plan]
// A hook is a trigger, a collective its instruction; the rest are marked by the instruction that ends them: a
// wait_all_gather by the copy-out, a reshard by binding the shard, a wait_reduce_scatter by freeing the
// input. The final callback's post_backward calls that do nothing are in the log, so they are worked out
// here: every unit whose last hook was not its post_backward.
class Fsdp2EventWriter {
 public:
  Fsdp2EventWriter(const Recording& recording, const Plan& plan)
      : recording_(recording),
        plan_(plan),
        last_hook_(plan.units.size(), TriggerKind::kStepBegin),
        grads_(plan.units.size()),
        accumulated_(plan.units.size()),
        in_backward_(plan.units.size(), false),
        reduces_(plan.units.size(), true) {
    for (const ModuleCall& call : plan.strategy.setup) NoteSync(call);
  }

  std::vector<LogEvent> Run() {
    for (step_ = 0; step_ < recording_.steps; ++step_) {
      user_calls_ = CallsOf(step_);
      for (const Trigger& trigger : StepAt(plan_, step_).triggers) OnTrigger(trigger);
    }
    return std::move(events_);
  }

 private:
  LogEvent& Add(std::string op, const std::string& unit) {
    events_.push_back(
        {{{"step", std::to_string(step_)}, {"phase", phase_}, {"op", std::move(op)}, {"unit", unit}}});
    return events_.back();
  }

  void OnTrigger(const Trigger& trigger) {
    const bool has_group = trigger.unit >= 0 && !plan_.units[trigger.unit].parameters.empty();
    const std::string unit = DisplayName(trigger.unit < 0 ? "" : plan_.units[trigger.unit].fqn);
    switch (trigger.kind) {
      case TriggerKind::kPreForward:
      case TriggerKind::kPostForward:
        phase_ = in_pass_backward_ ? "backward" : "forward";
        if (trigger.kind == TriggerKind::kPreForward) {
          if (forward_root_ < 0) forward_root_ = trigger.unit;
          entered_.insert(trigger.unit);
        } else {
          entered_.erase(trigger.unit);
        }
        if (has_group && !in_backward_[trigger.unit]) {
          Add(trigger.kind == TriggerKind::kPreForward ? "pre_forward" : "post_forward", unit);
          last_hook_[trigger.unit] = trigger.kind;
        }
        break;
      case TriggerKind::kPreBackward:
        phase_ = "backward";
        in_pass_backward_ = true;
        if (has_group) {
          LogEvent& event = Add("pre_backward", unit);
          if (last_hook_[trigger.unit] == TriggerKind::kPreBackward) event.keys["noop"] = "1";
          last_hook_[trigger.unit] = trigger.kind;
        }
        in_backward_[trigger.unit] = true;
        if (const UnitId root = RootOf(trigger.unit);
            std::ranges::find(callbacks_, root) == callbacks_.end()) {
          callbacks_.push_back(root);
        }
        break;
      case TriggerKind::kPostBackward:
        phase_ = "backward";
        Add("post_backward", unit).keys["via"] = "autograd";
        NotePending(trigger.unit);
        last_hook_[trigger.unit] = trigger.kind;
        break;
      case TriggerKind::kBackwardEnd:
        return OnBackwardEnd(trigger);
      case TriggerKind::kOptimizerStep:
      case TriggerKind::kZeroGrad:
        phase_ = "optim";
        Add(trigger.kind == TriggerKind::kOptimizerStep ? "optim_step" : "zero_grad", DisplayName(""));
        break;
      case TriggerKind::kUserCall:
        return OnUserCall(trigger);
      case TriggerKind::kStepBegin:
      case TriggerKind::kLazyInit:
      case TriggerKind::kStepEnd:
        break;
    }
    bool accumulates = trigger.kind == TriggerKind::kPostBackward;
    std::vector<UnitId> completed = Completed(trigger);
    for (const Instruction& instruction : trigger.instructions) {
      if (const auto here = std::ranges::find(completed, instruction.unit); here != completed.end()) {
        Complete(std::span(completed.begin(), here + 1));
        completed.erase(completed.begin(), here + 1);
      }
      if (instruction.kind == InstructionKind::kCompute && accumulates) {
        Accumulate(trigger.unit);  // the hook is over, the model computes
        accumulates = false;
      }
      OnInstruction(instruction);
    }
    Complete(completed);
    if (accumulates) Accumulate(trigger.unit);
  }

  // Groups of which a module has not run, in the post-forward of the forward's root.
  std::vector<UnitId> Completed(const Trigger& trigger) {
    std::vector<UnitId> completed;
    if (trigger.kind != TriggerKind::kPostForward || trigger.unit != forward_root_) return completed;
    forward_root_ = -1;
    if (Old()) return completed;
    for (const UnitId unit : States(trigger.unit) | std::views::reverse) {
      if (plan_.units[unit].modules.size() > 1 && entered_.erase(unit) > 0) completed.push_back(unit);
    }
    return completed;
  }

  void Complete(std::span<const UnitId> groups) {
    for (const UnitId unit : groups) {
      Add("post_forward", UnitName(plan_.units[unit]));
      last_hook_[unit] = TriggerKind::kPostForward;
    }
  }

  void NoteSync(const ModuleCall& call) {
    if (call.method != "set_requires_gradient_sync") return;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      if (Reaches(call, plan_.units[u].modules.front())) reduces_[u] = call.value.value_or(true);
    }
  }

  // FSDPParamGroup.post_backward has run.
  void NotePending(UnitId unit) {
    reduces_[unit] ? static_cast<void>(pending_.erase(unit)) : static_cast<void>(pending_.insert(unit));
  }

  // Each call of the user's is a trigger.
  std::deque<ModuleCall> CallsOf(std::int32_t step) const {
    std::deque<ModuleCall> calls;
    for (const ProgramCall& call : ProgramOfStep(plan_.strategy, step)) {
      if (const auto* of_module = std::get_if<ModuleCall>(&call)) calls.push_back(*of_module);
    }
    return calls;
  }

  void OnUserCall(const Trigger& trigger) {
    SHARDPLAN_ASSERT(!user_calls_.empty(), "a call of the user's is in the program");
    const ModuleCall call = user_calls_.front();
    user_calls_.pop_front();
    phase_ = "forward";
    NoteSync(call);
    std::size_t next = 0;
    if (call.method == "finalize_backward") {
      phase_ = "backward";
      Add("finalize_backward", DisplayName(call.module));
      const std::vector<UnitId> states = States(trigger.unit);
      for (const UnitId unit : states | std::views::reverse) {
        const bool pends = pending_.contains(unit);
        if (pends) {
          Add("post_backward", UnitName(plan_.units[unit])).keys["via"] = "manual";
          NotePending(unit);
        }
        for (; next < trigger.instructions.size() && !Finalizes(trigger.instructions[next]) &&
               UnitAt(trigger.instructions, next) == unit;
             ++next) {
          OnInstruction(trigger.instructions[next]);
        }
        if (pends && !reduces_[unit]) Accumulate(unit);
      }
    }
    const bool waits = call.method == "wait_for_gradient_reduction" ||
                       (call.method == "finalize_backward" && !call.value.value_or(false));
    if (waits) {
      phase_ = "backward";
      Add("wait_gradient_reduction", DisplayName(call.module));
    }
    const bool resets = IsReset(call);
    if (resets) Reset(call.module);
    for (; next < trigger.instructions.size(); ++next) {
      OnInstruction(trigger.instructions[next], waits || resets);
    }
  }

  // Work that the raised pass was in the middle of is over.
  void Reset(const std::string& module) {
    Add("reset_iter_state", DisplayName(module));
    in_pass_backward_ = false;
    forward_root_ = -1;
    entered_.clear();
    pending_.clear();
    callbacks_.clear();
    last_hook_.assign(last_hook_.size(), TriggerKind::kStepBegin);
    in_backward_.assign(in_backward_.size(), false);
  }

  static bool Finalizes(const Instruction& i) { return i.reason.str() == "finalize"; }

  // Whether the user ends backwards (set_manual_backward_finalization).
  bool Manual() const {
    bool manual = false;
    for (const ModuleCall& call : plan_.strategy.setup) {
      if (call.method == "set_manual_backward_finalization") manual = call.value.value_or(true);
    }
    return manual;
  }

  void OnBackwardEnd(const Trigger& trigger) {
    phase_ = "backward";
    in_pass_backward_ = false;
    std::size_t next = 0;
    if (!callbacks_.empty()) {
      forward_root_ = -1;
      entered_.clear();
    }
    for (const UnitId root : std::exchange(callbacks_, {})) FinalCallback(root, trigger, next);
    for (; next < trigger.instructions.size(); ++next) OnInstruction(trigger.instructions[next], true);
  }

  // The final callback that a root's units have queued, from the trigger's instruction `next` on. 2.11
  // finalizes each unit right behind its post-backward, later releases all behind the last one.
  void FinalCallback(UnitId root, const Trigger& trigger, std::size_t& next) {
    Add("finalize", DisplayName(""));
    const auto emit_while = [&](const auto& wanted) {
      for (; next < trigger.instructions.size() && wanted(trigger.instructions[next]); ++next) {
        OnInstruction(trigger.instructions[next], /*backward_end=*/true);
      }
    };
    for (const UnitId unit : LastGroupsFirst(States(root))) {
      const bool has_group = !plan_.units[unit].parameters.empty();
      const bool left = has_group && last_hook_[unit] != TriggerKind::kPostBackward;
      const bool deferred = left && Manual() && reduces_[unit];
      if (deferred) pending_.insert(unit);
      const auto ends = [&](const Instruction& i) {
        return !Finalizes(i) && UnitAt(trigger.instructions, next) == unit;
      };
      if (left && !deferred) {
        NotePending(unit);
        Add("post_backward", UnitName(plan_.units[unit])).keys["via"] = "final";
        emit_while(ends);
        Accumulate(unit);
      }
      if (Old()) emit_while([&](const Instruction& i) { return Finalizes(i) && i.unit == unit; });
      last_hook_[unit] = TriggerKind::kStepBegin;
      in_backward_[unit] = false;
    }
    const std::vector<UnitId> states = States(root);
    emit_while([&](const Instruction& i) {
      return Finalizes(i) && DropsOwn(root, i) &&
             (i.unit < 0 || (!Old() && std::ranges::find(states, i.unit) != states.end()));
    });
  }

  // A root's callback drops what its communication context keeps, and that of another root what is left.
  bool DropsOwn(UnitId root, const Instruction& i) const {
    if (i.kind != InstructionKind::kFree) return true;
    const UnitId owner = plan_.buffers[i.src].unit;
    return owner < 0 || SharesContext(root, RootOf(owner));
  }

  bool SharesContext(UnitId a, UnitId b) const {
    const auto is_named = [&](const std::vector<std::string>& group, UnitId unit) {
      return std::ranges::any_of(group, [&](const std::string& pattern) {
        return Matches(pattern, plan_.units[unit].modules.front());
      });
    };
    return a == b || std::ranges::any_of(plan_.strategy.fsdp2.shared_comm_contexts, [&](const auto& group) {
             return is_named(group, a) && is_named(group, b);
           });
  }

  bool Old() const { return PyTorchOfPlan(plan_.strategy) == PyTorchVersion::k2_11; }

  // An instruction of no unit (another unit's buffer is dropped) is behind the wait of the unit that drops
  // it.
  static UnitId UnitAt(const std::vector<Instruction>& instructions, std::size_t i) {
    while (i > 0 && instructions[i].unit < 0) --i;
    return instructions[i].unit;
  }

  // The outermost unit around a unit's (first) module.
  UnitId RootOf(UnitId unit) const {
    const std::string& module = plan_.units[unit].modules.front();
    UnitId root = unit;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      for (const std::string& other : plan_.units[u].modules) {
        if (IsUnder(module, other) && other.size() < plan_.units[root].modules.front().size()) {
          root = static_cast<UnitId>(u);
        }
      }
    }
    return root;
  }

  // FSDPStateContext.all_states: named_modules() order; 2.11 has a group of two modules twice.
  std::vector<UnitId> States(UnitId root) const {
    std::map<std::string, std::vector<UnitId>> units_of;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      for (const std::string& module : plan_.units[u].modules) {
        units_of[module].push_back(static_cast<UnitId>(u));
      }
    }
    std::vector<UnitId> states;
    for (const Module& module : recording_.trace.modules) {
      const auto found = units_of.find(module.fqn);
      if (found == units_of.end() || !IsUnder(module.fqn, plan_.units[root].modules.front())) continue;
      for (const UnitId unit : found->second) {
        const bool again = std::ranges::find(states, unit) != states.end();
        if (!again || Old()) states.push_back(unit);
      }
    }
    return states;
  }

  // The parameter groups of a module, which are one after the other, as its backward ends.
  std::vector<UnitId> LastGroupsFirst(std::vector<UnitId> states) const {
    for (auto first = states.begin(); first != states.end();) {
      const auto last = std::find_if(first + 1, states.end(),
                                     [&](UnitId unit) { return plan_.units[unit].parameter_group == 0; });
      std::reverse(first, last);
      first = last;
    }
    return states;
  }

  void Accumulate(UnitId id) {
    const Unit& unit = plan_.units[id];
    std::int64_t bytes = 0;
    std::optional<DType> first;
    for (std::int32_t p = 0; p < std::ssize(unit.parameters); ++p) {
      const UnitParameter& parameter = unit.parameters[p];
      const bool waits = accumulated_[id].contains(p);
      if (!waits && !grads_[id].contains(p)) continue;
      const DType dtype = waits ? AccumulatedGradDType(unit, parameter) : MadeGradDType(unit, parameter);
      if (!first) first = dtype;
      std::int64_t size = SizeBytes(dtype);
      for (const std::int64_t extent : parameter.shape) size *= extent;
      bytes += size;
    }
    if (!first) return;
    LogEvent& event = Add("accumulate", UnitName(unit));
    event.keys["bytes"] = std::to_string(bytes);
    event.keys["dtype"] = Name(*first);
    event.keys["kind"] = "unsharded";
  }

  void AddSize(LogEvent& event, const Buffer& buffer) {
    event.keys["bytes"] = std::to_string(SizeBytes(buffer).value);
    event.keys["dtype"] = Name(buffer.dtype);
  }

  void AddCollective(std::string op, const Buffer& buffer, const Instruction& instruction,
                     std::string group) {
    LogEvent& event = Add(std::move(op), UnitName(plan_.units[buffer.unit]));
    AddSize(event, buffer);
    event.keys["group"] = std::move(group);
    event.keys["ranks"] = std::to_string(plan_.communicators[instruction.communicator].size);
  }

  void OnInstruction(const Instruction& i, bool backward_end = false) {
    switch (i.kind) {
      case InstructionKind::kCompute:
        for (const SegmentGrad& grad : plan_.segments[i.segment].grads)
          grads_[grad.unit].insert(grad.parameter);
        break;
      case InstructionKind::kAllGather:
        AddCollective("all_gather", plan_.buffers[i.dst], i, "shard");
        break;
      case InstructionKind::kCopyOut:
        Add("wait_all_gather", UnitName(plan_.units[i.unit]));
        break;
      case InstructionKind::kBindSharded: {
        LogEvent& event = Add("reshard", UnitName(plan_.units[i.unit]));
        const bool whole = plan_.buffers[i.src].role == BufferRole::kParamSharded;
        event.keys["to"] = whole ? "sharded" : "post_forward";
        event.keys["bytes"] =
            std::to_string(FlagSetOn(plan_.strategy, plan_.units[i.unit], "set_keep_unsharded_storage")
                               ? 0
                               : UnshardedBytes(i.unit));
        break;
      }
      case InstructionKind::kReduceScatter:
        AddCollective("reduce_scatter", plan_.buffers[i.src], i, "shard");
        if (plan_.buffers[i.dst].role == BufferRole::kPartialReduceOutput) AddPartial(plan_.buffers[i.dst]);
        break;
      case InstructionKind::kAllReduce:
        // Partial sums that tensor parallelism leaves are reduced by DTensor, which is in no log.
        if (plan_.buffers[i.src].role != BufferRole::kReduceScatterOutput) break;
        AddCollective("all_reduce", plan_.buffers[i.src], i, "replicate");
        break;
      case InstructionKind::kUpdateCopyIn:
      case InstructionKind::kAllToAll:
      case InstructionKind::kUpdateGather:
      case InstructionKind::kOrthogonalize:
      case InstructionKind::kUpdateApply:
      case InstructionKind::kOptimizerStep:
        if (i.parameter >= 0) {
          const Unit& unit = plan_.units[i.unit];
          Add("optim_in_backward", UnitName(unit)).keys["param"] = unit.parameters[i.parameter].fqn;
        }
        break;
      case InstructionKind::kGradCopyIn:  // one rank has nothing to reduce
        if (plan_.buffers[i.dst].role == BufferRole::kPartialReduceOutput &&
            plan_.buffers[i.src].role != BufferRole::kPartialReduceOutput) {
          AddPartial(plan_.buffers[i.dst]);
        }
        break;
      case InstructionKind::kGradAccumulate:
        if (plan_.buffers[i.dst].role == BufferRole::kPartialReduceOutput) AddPartial(plan_.buffers[i.dst]);
        break;
      case InstructionKind::kGradCast:
        if (plan_.buffers[i.dst].role == BufferRole::kGradUnshardedAccumulated)
          for (const std::int32_t p : plan_.buffers[i.dst].parameters) accumulated_[i.unit].insert(p);
        break;
      case InstructionKind::kFree:
        OnFree(plan_.buffers[i.src], backward_end && i.unit >= 0);
        break;
      case InstructionKind::kAllocate:
      case InstructionKind::kBindUnsharded:
      case InstructionKind::kCopyIn:
      case InstructionKind::kReshardPostForward:
      case InstructionKind::kGradScale:
      case InstructionKind::kGradZero:
      case InstructionKind::kCopyToHost:
      case InstructionKind::kCopyToDevice:
      case InstructionKind::kWait:
        if (i.reason.str() == "partly_run") Add("wait_post_reduce", UnitName(plan_.units[i.unit]));
        break;
      case InstructionKind::kRecord:
      case InstructionKind::kHostWait:
      case InstructionKind::kZeroGrad:
        break;
    }
  }

  void AddPartial(const Buffer& buffer) {
    LogEvent& event = Add("accumulate", UnitName(plan_.units[buffer.unit]));
    AddSize(event, buffer);
    event.keys["kind"] = "partial";
  }

  void OnFree(const Buffer& buffer, bool discards) {
    if (buffer.role == BufferRole::kReduceScatterInput)
      Add("wait_reduce_scatter", UnitName(plan_.units[buffer.unit]));
    if (buffer.role == BufferRole::kAllGatherOutput && discards)
      Add("discard_all_gather", UnitName(plan_.units[buffer.unit]));
    if (buffer.role == BufferRole::kGradUnsharded) Erase(grads_[buffer.unit], buffer);
    if (buffer.role == BufferRole::kGradUnshardedAccumulated) Erase(accumulated_[buffer.unit], buffer);
  }

  static void Erase(std::set<std::int32_t>& held, const Buffer& buffer) {
    for (const std::int32_t p : buffer.parameters) held.erase(p);
  }

  // Gathered bytes, all tensors of an extension included, without what the extension made of them.
  std::int64_t UnshardedBytes(UnitId unit) const {
    std::int64_t bytes = 0;
    for (const Buffer& buffer : plan_.buffers) {
      const bool gathered =
          buffer.role == BufferRole::kParamUnsharded || buffer.role == BufferRole::kExtensionGathered;
      if (buffer.unit == unit && gathered) bytes += SizeBytes(buffer).value;
    }
    return bytes;
  }

  const Recording& recording_;
  const Plan& plan_;
  std::vector<LogEvent> events_;
  std::int32_t step_ = 0;
  std::string phase_ = "forward";
  bool in_pass_backward_ = false;
  std::deque<ModuleCall> user_calls_;   // of the step, that are still to come
  std::set<UnitId> pending_;            // FSDPParamGroup._post_backward_pending
  UnitId forward_root_ = -1;            // FSDPStateContext.iter_forward_root
  std::set<UnitId> entered_;            // and not left
  std::vector<TriggerKind> last_hook_;  // by unit
  std::vector<std::set<std::int32_t>> grads_, accumulated_;
  std::vector<UnitId> callbacks_;  // roots that have queued their final callback, in that order
  std::vector<bool> in_backward_;  // FSDPState._training_state is PRE_BACKWARD
  std::vector<bool> reduces_;      // FSDPParamGroup.reduce_grads
};

}  // namespace

std::vector<LogEvent> Fsdp2Events(const Recording& recording, const Plan& plan) {
  return Fsdp2EventWriter(recording, plan).Run();
}

}  // namespace shardplan::conformance
