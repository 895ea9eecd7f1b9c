// SPDX-License-Identifier: Apache-2.0
#include "order/record_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>

#include "order/backward_times.h"
#include "order/group_forwards.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace {

class Recorder {
 public:
  Recorder(const Trace& trace, const ModelIndex& index, const Partition& partition, const PyTorchRules& rules,
           bool inputs_wrapped)
      : trace_(trace),
        index_(index),
        partition_(partition),
        inputs_wrapped_(inputs_wrapped),
        groups_(partition, rules) {}

  // State that a step leaves to the next ones.
  auto Carried() const {
    return std::tuple(groups_, is_last_backward_, post_forwards_, input_hooks_, output_hooks_);
  }

  // A call before the first step.
  void NoteCall(const ModuleCall& call) {
    if (call.method == "set_is_last_backward") is_last_backward_ = call.value.value_or(true);
  }

  Result<RecordedStep> Record(const StepProgram& program, std::size_t step) {
    step_ = {};
    // Calls before the step's first forward have these.
    microbatch_ = 0;
    grad_enabled_ = training_ = true;
    for (std::size_t c = 0; c < program.size(); ++c) {
      pointer_ = fmt::format("/program/{}/{}", step, c);
      if (!abandoned_.empty() && !Resets(program[c])) {
        return MakeInputError(
            abandoned_,
            fmt::format(
                "the pass raised in its middle, where it left FSDP's state, and call {} of step {} of "
                "the strategy's program comes behind it",
                c, step),
            "another call", "a call of reset_iter_state");
      }
      abandoned_.clear();
      Status status = std::visit([&](const auto& call) { return Call(call); }, program[c]);
      if (!status) return std::unexpected(status.error());
      if (IsPass(program[c]) && pass_->abandoned) {
        abandoned_ = fmt::format("/{}/{}/abandoned", in_backward_ ? "backwards" : "forwards", pass_index_);
      }
    }
    return std::move(step_);
  }

 private:
  static bool Resets(const ProgramCall& call) {
    const auto* module = std::get_if<ModuleCall>(&call);
    return module != nullptr && IsReset(*module);
  }
  static bool IsPass(const ProgramCall& call) {
    return std::holds_alternative<ForwardCall>(call) || std::holds_alternative<BackwardCall>(call);
  }

  // The place of the model's compute: name and unit of a segment that is cut here.
  struct Place {
    std::string name;
    SegmentPhase phase = SegmentPhase::kForward;
    UnitId unit = -1;
  };

  // (micro-batch, Run, canonical module, occurrence): one call of a module.
  using ModuleRun = std::tuple<std::int32_t, std::int32_t, ModuleId, std::int32_t>;

  Status Call(const ForwardCall& call) {
    if (call.trace < 0 || call.trace >= static_cast<std::int32_t>(trace_.forwards.size())) {
      return MakeInputError(pointer_ + "/trace", "the trace has no such forward",
                            fmt::format("{}", call.trace), fmt::format("below {}", trace_.forwards.size()));
    }
    Begin(/*backward=*/false, call.trace, call.microbatch, {.name = "forward"});
    grad_enabled_ = pass_->grad_enabled;
    training_ = call.training.value_or(grad_enabled_);
    forwards_.assign(1, {.name = "forward"});
    const auto is_run_before = [&](const auto& hook) {
      return std::get<0>(hook.first) == microbatch_ && std::get<1>(hook.first) == run_;
    };
    std::erase_if(input_hooks_, is_run_before);
    std::erase_if(output_hooks_, is_run_before);
    std::map<ModuleId, std::int32_t> runs;
    std::vector<std::int32_t> open;          // occurrence of every module that is running
    std::vector<const EnterEvent*> entered;  // and how it was entered
    Push(HookPointKind::kForwardBegin, -1);
    for (std::size_t i = 0; i < pass_->events.size(); ++i) {
      if (const auto* enter = std::get_if<EnterEvent>(&pass_->events[i])) {
        const ModuleId module = index_.canonical[enter->module];
        open.push_back(runs[module]++);
        entered.push_back(enter);
        OnEnter(module, open.back(), static_cast<std::int32_t>(i));
      } else if (const auto* exit = std::get_if<ExitEvent>(&pass_->events[i])) {
        OnExit(index_.canonical[exit->module], open.back(), *entered.back(), *exit,
               static_cast<std::int32_t>(i));
        open.pop_back();
        entered.pop_back();
      }
    }
    Cut(static_cast<std::int32_t>(pass_->events.size()));
    Push(HookPointKind::kForwardEnd, -1);
    return {};
  }

  void OnEnter(ModuleId module, std::int32_t occurrence, std::int32_t position) {
    const UnitId unit = partition_.unit_of_module[module];
    if (unit < 0) return;
    const GroupForwards::Entered entered = groups_.Enter(unit);
    if (!entered.runs_hook) return;
    Cut(position);
    PushOfAll(HookPointKind::kPreForward, unit);
    if (grad_enabled_ && entered.registers_inputs) {
      input_hooks_[{microbatch_, run_, module, occurrence}] = unit;
    }
    if (!entered.begins) return;
    forwards_.push_back({"forward " + UnitName(unit), SegmentPhase::kForward, unit});
    place_ = forwards_.back();
  }

  bool IsTrainable(UnitId unit) const {
    return std::ranges::any_of(partition_.units[unit].unit.parameters,
                               [](const UnitParameter& parameter) { return parameter.requires_grad; });
  }

  void OnExit(ModuleId module, std::int32_t occurrence, const EnterEvent& enter, const ExitEvent& exit,
              std::int32_t position) {
    const UnitId unit = partition_.unit_of_module[module];
    if (unit < 0) return;
    if (!groups_.Leave(unit, module)) return;
    Cut(position);
    const std::vector<UnitId> completed = groups_.Complete(unit);
    HookPoint& event = Push(HookPointKind::kPostForward, unit);
    for (const TensorId tensor : exit.outputs) {
      event.outputs_require_grad = event.outputs_require_grad || pass_->tensors[tensor].requires_grad;
    }
    // Part of a forward can run without gradients: then nothing that trainable parameters made needs one, or
    // that any parameters made, would they train. A tensor that would need one if they did was made with
    // gradients; a tensor that is passed through tells nothing.
    const auto is_made = [&](TensorId tensor) {
      return std::ranges::find(enter.inputs, tensor) == enter.inputs.end();
    };
    const auto never_requires = [&](TensorId tensor) {
      return is_made(tensor) && pass_->tensors[tensor].may_require_grad == false;
    };
    const auto may_require = [&](TensorId tensor) {
      return is_made(tensor) && pass_->tensors[tensor].may_require_grad == true;
    };
    const bool makes =
        std::ranges::any_of(exit.outputs, is_made) && std::ranges::none_of(exit.outputs, may_require);
    if (!event.outputs_require_grad && makes &&
        (IsTrainable(unit) || (!partition_.units[unit].unit.parameters.empty() &&
                               std::ranges::any_of(exit.outputs, never_requires)))) {
      event.grad_enabled = false;
    }
    post_forwards_[unit] = {event.grad_enabled, event.outputs_require_grad};
    RepeatForOtherGroups(unit);
    if (grad_enabled_) {
      std::vector<UnitId>& hooks = output_hooks_[{microbatch_, run_, module, occurrence}];
      hooks = {unit};
      hooks.insert(hooks.end(), completed.begin(), completed.end());
    }
    // A group that was entered in an earlier forward, in which not all of its modules ran, has no name here.
    if (forwards_.size() > 1) forwards_.pop_back();
    place_ = partition_.units[unit].is_root ? Place{"loss", SegmentPhase::kLoss} : forwards_.back();
  }

  Status Call(const BackwardCall& call) {
    if (call.trace < 0 || call.trace >= static_cast<std::int32_t>(trace_.backwards.size())) {
      return MakeInputError(pointer_ + "/trace", "the trace has no such backward",
                            fmt::format("{}", call.trace), fmt::format("below {}", trace_.backwards.size()));
    }
    Begin(/*backward=*/true, call.trace, call.microbatches.front(),
          {"backward loss", SegmentPhase::kBackward});
    grad_enabled_ = true;
    std::vector<std::int32_t> last_grad(partition_.units.size(), -1);
    FindLastGrads(last_grad);
    std::vector<AutogradEvent> engine;
    if (!inputs_wrapped_) engine = FindAutogradEvents(trace_, index_, partition_, call.trace);
    auto next = engine.begin();
    const auto push_engine_events = [&](std::int32_t position) {
      for (; next != engine.end() && next->position <= position; ++next) {
        InForward(call, next->forward);
        Cut(next->position);
        Push(next->inputs_done ? HookPointKind::kInputsGradDone : HookPointKind::kUnitBackwardDone,
             next->unit)
            .occurrence = next->occurrence;
        in_backward_units_.erase(next->unit);
      }
    };
    HookPoint& begin = Push(HookPointKind::kBackwardBegin, -1);
    begin.range = {.backward = true, .pass = call.trace};
    for (std::size_t f = 0; f < pass_->forwards.size(); ++f) {
      begin.microbatches.push_back(MicrobatchOf(call.microbatches, static_cast<std::int32_t>(f)));
      begin.runs.push_back(Run(pass_->forwards[f]));
    }
    for (std::size_t i = 0; i < pass_->events.size(); ++i) {
      push_engine_events(static_cast<std::int32_t>(i));
      OnBackwardEvent(pass_->events[i], static_cast<std::int32_t>(i), call, last_grad);
    }
    push_engine_events(static_cast<std::int32_t>(pass_->events.size()));
    if (!engine_done_ && !pass_->abandoned) EndBackward(static_cast<std::int32_t>(pass_->events.size()));
    Cut(static_cast<std::int32_t>(pass_->events.size()));
    return {};
  }

  // Later points belong to a forward that the backward covers.
  void InForward(const BackwardCall& call, std::int32_t forward) {
    microbatch_ = MicrobatchOf(call.microbatches, forward);
    forward_ = forward;
    run_ = Run(pass_->forwards[static_cast<std::size_t>(forward)]);
  }

  // FSDP2 learns of the end from a callback that its first pre-backward hook has queued: without one (a loss
  // that runs a module backward whose unit is not called) there is none.
  void EndBackward(std::int32_t position) {
    Cut(position);
    place_ = {"backward returns", SegmentPhase::kBackward};
    engine_done_ = true;
    if (inputs_wrapped_ && !is_hooked_ && !trace_.calls.empty()) return;
    Push(HookPointKind::kBackwardEnd, -1);
    groups_.BackwardEnd(is_last_backward_);
    in_backward_units_.clear();
  }

  void FindLastGrads(std::vector<std::int32_t>& last) const {
    for (std::size_t i = 0; i < pass_->events.size(); ++i) {
      if (const auto* grad = std::get_if<ParameterGradEvent>(&pass_->events[i])) {
        const UnitParameterRef owner = OwnerOf(partition_, grad->parameter, -1);
        if (owner.unit >= 0) last[owner.unit] = static_cast<std::int32_t>(i);
      }
    }
  }

  void OnBackwardEvent(const TraceEvent& event, std::int32_t position, const BackwardCall& call,
                       const std::vector<std::int32_t>& last_grad) {
    if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
      InForward(call, ready->forward);
      const auto hooks = output_hooks_.find(RunOf(ready->module, ready->occurrence));
      if (hooks == output_hooks_.end()) return;
      Cut(position);
      for (const UnitId unit : hooks->second) {
        PushOfAll(HookPointKind::kPreBackward, unit);
        is_hooked_ = true;
        groups_.PreBackward(unit);
        in_backward_units_.insert(unit);
        place_ = {"backward " + UnitName(unit), SegmentPhase::kBackward, unit};
      }
    } else if (const auto* done = std::get_if<InputsGradDoneEvent>(&event)) {
      if (!inputs_wrapped_) return;  // an AutogradEvent where it matters
      InForward(call, done->forward);
      const auto hook = input_hooks_.find(RunOf(done->module, done->occurrence));
      if (hook == input_hooks_.end()) return;
      Cut(position);
      std::vector<UnitId> groups = GroupsOf(partition_, hook->second);
      for (const UnitId group : groups | std::views::reverse) Push(HookPointKind::kInputsGradDone, group);
      groups_.PostBackward(hook->second);
      in_backward_units_.erase(hook->second);
    } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
      const UnitParameterRef owner = OwnerOf(partition_, grad->parameter, -1);
      if (!inputs_wrapped_ || owner.unit < 0 || last_grad[owner.unit] != position) return;
      Cut(position + 1);
      Push(HookPointKind::kParameterGradsDone, owner.unit);
    } else if (const auto* enter = std::get_if<RecomputeEnterEvent>(&event)) {
      if (recomputing_.empty()) {
        Cut(position);
        backward_ =
            std::exchange(place_, {"recompute " + DisplayName(trace_.modules[enter->module].fqn),
                                   SegmentPhase::kRecompute, UnitAround(index_, partition_, enter->module)});
        outermost_is_hooked_ = RunsHooks(enter->module);
        if (outermost_is_hooked_) OnRecompute(enter->module, position, HookPointKind::kRecomputePreForward);
      } else {
        OnRecompute(enter->module, position, HookPointKind::kRecomputePreForward);
      }
      recomputing_.push_back(enter->module);
    } else if (const auto* exit = std::get_if<RecomputeExitEvent>(&event)) {
      // A recomputation that stops early leaves inner modules without running their hooks.
      while (!recomputing_.empty() && recomputing_.back() != exit->module) recomputing_.pop_back();
      if (!recomputing_.empty()) recomputing_.pop_back();
      if (!recomputing_.empty()) {
        OnRecompute(exit->module, position, HookPointKind::kRecomputePostForward);
      } else {
        const bool leaves = std::exchange(outermost_is_hooked_, false) && !exit->stopped;
        if (leaves) OnRecompute(exit->module, position, HookPointKind::kRecomputePostForward);
        Cut(position);
        place_ = backward_;
      }
    } else if (std::holds_alternative<BackwardEndEvent>(event)) {
      EndBackward(position);
    }
  }

  // Takes the outermost module that runs again. A checkpoint that is inside of the hooks of its unit (a
  // wrapper that is applied before FSDP, or one of `forward`) recomputes behind the unit's pre-backward, and
  // runs no hooks. One around a function that calls the module runs them, and may do so before that
  // pre-backward, or behind the post-backward of another call: the parameters are sharded then. A reentrant
  // checkpoint, whose forward ran without gradients, is not told apart from one inside of the hooks.
  bool RunsHooks(ModuleId entry) const {
    const UnitId unit = partition_.unit_of_module[index_.canonical[entry]];
    if (unit < 0 || in_backward_units_.contains(unit)) return false;
    const auto left = post_forwards_.find(unit);
    return left != post_forwards_.end() && left->second.second;
  }

  void OnRecompute(ModuleId entry, std::int32_t position, HookPointKind kind) {
    const ModuleId module = index_.canonical[entry];
    const UnitId unit = partition_.unit_of_module[module];
    if (unit < 0) return;
    const bool runs = kind == HookPointKind::kRecomputePreForward ? groups_.Enter(unit).runs_hook
                                                                  : groups_.Leave(unit, module);
    if (!runs) return;
    Cut(position);
    // Recomputation runs as its forward did: with gradients enabled, or in part without.
    HookPoint& event = Push(kind, unit);
    event.outputs_require_grad = true;
    if (const auto found = post_forwards_.find(unit);
        kind == HookPointKind::kRecomputePostForward && found != post_forwards_.end()) {
      std::tie(event.grad_enabled, event.outputs_require_grad) = found->second;
    }
    RepeatForOtherGroups(unit);
  }

  Status Call(const OptimizerStepCall&) {
    Push(HookPointKind::kOptimizerStep, -1);
    return {};
  }
  Status Call(const ZeroGradCall&) {
    Push(HookPointKind::kZeroGrad, -1);
    return {};
  }
  Status Call(const ModuleCall& call) {
    const auto found = index_.by_fqn.find(call.module);
    if (found == index_.by_fqn.end()) {
      return MakeInputError(pointer_ + "/module", "there is no such module", call.module);
    }
    HookPoint& event =
        Push(HookPointKind::kModuleCall, partition_.unit_of_module[index_.canonical[found->second]]);
    event.call = &call;
    NoteCall(call);
    if (IsReset(call)) {
      groups_.Reset();
      in_backward_units_.clear();
      recomputing_.clear();
    }
    return {};
  }

  void Begin(bool backward, std::int32_t pass, std::int32_t microbatch, Place place) {
    pass_ = backward ? &trace_.backwards[pass] : &trace_.forwards[pass];
    in_backward_ = backward;
    pass_index_ = pass;
    microbatch_ = microbatch;
    forward_ = 0;
    run_ = Run(backward ? pass_->forwards.front() : pass);
    segment_begin_ = 0;
    place_ = std::move(place);
    engine_done_ = false;
    is_hooked_ = false;
  }

  std::string UnitName(UnitId unit) const { return DisplayName(partition_.units[unit].unit.fqn); }

  // Which of a micro-batch's forwards it is. If the trace lists no calls there is one, and forwards of the
  // trace that are alike stand for each other.
  std::int32_t Run(std::int32_t forward) const { return trace_.calls.empty() ? 0 : forward; }

  // The run of the module in the forward that the backward is in.
  ModuleRun RunOf(ModuleId module, std::int32_t occurrence) const {
    return {microbatch_, run_, index_.canonical[module], occurrence};
  }

  // Everything since the last cut is one segment.
  void Cut(std::int32_t position) {
    SHARDPLAN_ASSERT(position >= segment_begin_, "events are passed in order");
    if (position > segment_begin_) {
      HookPoint& event = Push(HookPointKind::kSegment, place_.unit);
      event.range = {in_backward_, pass_index_, segment_begin_, position};
      event.forward = forward_;
      event.name = place_.name;
      event.phase = place_.phase;
    }
    segment_begin_ = position;
  }

  // Pushes the point for each parameter group of the modules that the unit hooks.
  void PushOfAll(HookPointKind kind, UnitId unit) {
    for (const UnitId group : GroupsOf(partition_, unit)) Push(kind, group);
  }

  // The latest hook point, for the groups behind `unit`.
  void RepeatForOtherGroups(UnitId unit) {
    for (const UnitId group : GroupsOf(partition_, unit)) {
      if (group == unit) continue;
      step_.events.push_back(HookPoint(step_.events.back()));
      step_.events.back().unit = group;
    }
  }

  HookPoint& Push(HookPointKind kind, UnitId unit) {
    step_.events.push_back({.kind = kind,
                            .unit = unit,
                            .microbatch = microbatch_,
                            .run = run_,
                            .grad_enabled = grad_enabled_,
                            .training = training_});
    return step_.events.back();
  }

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const bool inputs_wrapped_;
  RecordedStep step_;
  std::string pointer_;
  const Pass* pass_ = nullptr;
  bool in_backward_ = false;
  bool grad_enabled_ = true;
  bool training_ = true;
  std::int32_t pass_index_ = -1;
  std::int32_t microbatch_ = 0;
  std::int32_t forward_ = 0;  // that the backward covers
  std::int32_t run_ = 0;      // HookPoint::run
  std::int32_t segment_begin_ = 0;
  Place place_;
  Place backward_;                     // around a recomputation
  bool engine_done_ = false;           // the backward has passed its end
  bool is_hooked_ = false;             // a pre-backward hook has run in the backward
  std::string abandoned_;              // the pass before the call, where it is
  std::vector<ModuleId> recomputing_;  // modules whose forward is being run again, outermost first
  bool outermost_is_hooked_ = false;
  std::set<UnitId> in_backward_units_;  // between their pre-backward and their post-backward
  std::vector<Place> forwards_;         // of the units that are entered, behind what is in none
  GroupForwards groups_;
  bool is_last_backward_ = true;
  std::map<UnitId, std::pair<bool, bool>>
      post_forwards_;  // of the latest: gradients enabled, outputs need one
  std::map<ModuleRun, UnitId> input_hooks_;
  std::map<ModuleRun, std::vector<UnitId>> output_hooks_;  // in the order of their registration
};

}  // namespace

Result<std::vector<RecordedStep>> RecordOrder(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, const Strategy& strategy,
                                              bool inputs_wrapped) {
  const auto program = [&](std::size_t s) -> const StepProgram& {
    return ProgramOfStep(strategy, static_cast<std::int64_t>(s));
  };
  std::size_t count = std::max<std::size_t>(1, strategy.program.size());
  while (count > 1 && program(count - 1) == program(count - 2)) --count;
  Recorder recorder(trace, index, partition, RulesOf(strategy), inputs_wrapped);
  for (const ModuleCall& call : strategy.setup) recorder.NoteCall(call);
  std::vector<RecordedStep> steps;
  // The last step once more: where it leaves groups incomplete, or undoes the forward of the step before,
  // other hooks fire then.
  bool repeats = false;
  for (std::size_t s = 0; s < count || !repeats; ++s) {
    const std::size_t last = std::min(s, count - 1);
    const auto before = recorder.Carried();
    Result<RecordedStep> step = recorder.Record(program(last), last);
    if (!step) return std::unexpected(step.error());
    steps.push_back(std::move(*step));
    repeats = s + 1 >= count && (recorder.Carried() == before || s > count);
  }
  while (steps.size() > count && steps.back() == steps[steps.size() - 2]) steps.pop_back();
  return steps;
}

}  // namespace shardplan
