// SPDX-License-Identifier: Apache-2.0
// Rule tables: the triggers of a step are passed by what the user calls in it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <variant>
#include <vector>

#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/program.h"
#include "verifier/tables.h"

namespace shardplan::verifier {
namespace {

bool IsOfUnit(TriggerKind kind) {
  return kind == TriggerKind::kPreForward || kind == TriggerKind::kPostForward ||
         kind == TriggerKind::kPreBackward || kind == TriggerKind::kPostBackward ||
         kind == TriggerKind::kUserCall;
}
// Belongs to the step, or to the job, and to no call.
bool IsOfStep(TriggerKind kind) {
  return kind == TriggerKind::kStepBegin || kind == TriggerKind::kStepEnd || kind == TriggerKind::kLazyInit;
}
// The last trigger of its call, which has one.
bool EndsCall(TriggerKind kind) {
  return kind == TriggerKind::kBackwardEnd || kind == TriggerKind::kUserCall ||
         kind == TriggerKind::kOptimizerStep || kind == TriggerKind::kZeroGrad;
}

std::string CallInWords(const ProgramCall& call) {
  if (const auto* forward = std::get_if<ForwardCall>(&call)) {
    return fmt::format("the forward of micro-batch {}", forward->microbatch);
  }
  if (const auto* backward = std::get_if<BackwardCall>(&call)) {
    return fmt::format("the backward of micro-batch {}", fmt::join(backward->microbatches, "+"));
  }
  if (const auto* module = std::get_if<ModuleCall>(&call)) {
    return fmt::format("{} of {}", module->method, DisplayName(module->module));
  }
  return std::holds_alternative<OptimizerStepCall>(call) ? "the optimizer's step" : "zero_grad";
}

// The places of the triggers of a step among its calls. A backward that passes no trigger leaves open to
// which of several a trigger belongs (see HasItsOwn): all possible places are followed.
class CallWalk {
 public:
  CallWalk(const Plan& plan, const StepProgram& program) : plan_(plan), calls_(program) {}

  // "": the trigger is of the call under way, or of one behind it.
  std::string Pass(const Trigger& trigger) {
    std::vector<Place> next;
    std::string wrong;
    for (const Place place : places_) {
      std::string why = Follow(trigger, place, next);
      if (wrong.empty()) wrong = std::move(why);
    }
    if (next.empty()) return wrong;
    std::ranges::sort(next);
    next.erase(std::unique(next.begin(), next.end()), next.end());
    places_ = std::move(next);
    const bool is_of_pass = !EndsCall(trigger.kind) || trigger.kind == TriggerKind::kBackwardEnd;
    if (!is_of_pass && trigger.microbatch != microbatch_) {
      return fmt::format("its micro-batch is {}, and that of the trigger before it {}", trigger.microbatch,
                         microbatch_);
    }
    microbatch_ = trigger.microbatch;
    return {};
  }

  // "": every call has ended.
  std::string End() const {
    std::string wrong;
    for (Place place : places_) {
      while (place.call < calls_.size() && !HasItsOwn(place)) place = {place.call + 1};
      if (place.call == calls_.size()) return {};
      if (wrong.empty()) wrong = fmt::format("no trigger ends {}", CallInWords(calls_[place.call]));
    }
    return wrong;
  }

 private:
  // A call, and whether one of its triggers was passed.
  struct Place {
    std::size_t call = 0;
    bool passed = false;
    auto operator<=>(const Place&) const = default;
  };

  // The places behind the trigger from this one on; "" when there are some.
  std::string Follow(const Trigger& trigger, Place place, std::vector<Place>& next) const {
    bool found = false;
    for (; place.call < calls_.size(); place = {place.call + 1}) {
      const bool is_of = IsOf(trigger, calls_[place.call]);
      if (is_of) {
        next.push_back(EndsCall(trigger.kind) ? Place{place.call + 1} : Place{place.call, true});
        found = true;
      }
      if (HasItsOwn(place)) {
        return found ? ""
                     : fmt::format("it is passed where {} is under way", CallInWords(calls_[place.call]));
      }
      if (is_of && !MayPassNone(place.call)) return {};
    }
    return found ? "" : "it is passed behind the last call that passes it";
  }

  // In a loss that runs several backwards, those of modules whose unit the loss does not call pass no
  // trigger: no hook of a unit runs in them. A group's post-backward is passed alone where the loss calls one
  // of its modules: the hook before the backward, which queues the end, is made when all of them have run.
  bool MayPassNone(std::size_t number) const {
    const auto* backward = std::get_if<BackwardCall>(&calls_[number]);
    return backward != nullptr && std::any_of(calls_.begin() + static_cast<std::ptrdiff_t>(number) + 1,
                                              calls_.end(), [&](const ProgramCall& call) {
                                                const auto* later = std::get_if<BackwardCall>(&call);
                                                return later != nullptr &&
                                                       later->microbatches == backward->microbatches;
                                              });
  }

  // A trigger ends the call. A forward of a model without units passes none; of optimizers that step in the
  // backward the calls may pass none, too. A backward that raised has no end: its state is reset.
  bool HasItsOwn(const Place& place) const {
    const ProgramCall& call = calls_[place.call];
    const auto* next =
        place.call + 1 < calls_.size() ? std::get_if<ModuleCall>(&calls_[place.call + 1]) : nullptr;
    const bool raises = next != nullptr && IsReset(*next);
    if (raises && std::holds_alternative<BackwardCall>(call)) return false;
    if (MayPassNone(place.call)) return false;
    const bool steps =
        std::holds_alternative<OptimizerStepCall>(call) || std::holds_alternative<ZeroGradCall>(call);
    return !std::holds_alternative<ForwardCall>(call) && !(steps && plan_.strategy.optimizer.in_backward);
  }

  bool IsOf(const Trigger& trigger, const ProgramCall& call) const {
    const bool in_forward =
        trigger.kind == TriggerKind::kPreForward || trigger.kind == TriggerKind::kPostForward;
    if (const auto* forward = std::get_if<ForwardCall>(&call)) {
      return in_forward && trigger.microbatch == forward->microbatch;
    }
    if (const auto* backward = std::get_if<BackwardCall>(&call)) {  // checkpointed forwards run in it again
      return (in_forward || trigger.kind == TriggerKind::kPreBackward ||
              trigger.kind == TriggerKind::kPostBackward || trigger.kind == TriggerKind::kBackwardEnd) &&
             std::ranges::find(backward->microbatches, trigger.microbatch) != backward->microbatches.end();
    }
    if (const auto* module = std::get_if<ModuleCall>(&call)) {
      const auto is_named = [&](const Unit& unit) { return unit.fqn == module->module; };
      const bool is_unit = std::ranges::any_of(plan_.units, is_named);
      const bool names_it = trigger.unit >= 0 && is_named(plan_.units[trigger.unit]);
      return trigger.kind == TriggerKind::kUserCall && (names_it || !is_unit);
    }
    return trigger.kind == (std::holds_alternative<OptimizerStepCall>(call) ? TriggerKind::kOptimizerStep
                                                                            : TriggerKind::kZeroGrad);
  }

  const Plan& plan_;
  const StepProgram& calls_;
  std::vector<Place> places_ = {Place{}};
  std::int32_t microbatch_ = 0;  // of the trigger before
};

}  // namespace

std::string TablesOfTrigger(const PlanStep& step, std::int32_t index) {
  const Trigger& trigger = step.triggers[index];
  // A root that is no unit is entered and left in a forward, and nobody waits for its gradients.
  const bool in_backward =
      trigger.kind == TriggerKind::kPreBackward || trigger.kind == TriggerKind::kPostBackward;
  if (in_backward && trigger.unit < 0) return "it names no unit";
  if (!IsOfUnit(trigger.kind) && trigger.unit >= 0) return "it is no unit's, and names one";
  if (trigger.kind == TriggerKind::kStepBegin && index > 0) return "it is not the first of its step";
  if (trigger.kind == TriggerKind::kStepEnd && index + 1 < std::ssize(step.triggers))
    return "it is not the last of its step";
  if (!IsOfStep(trigger.kind) || trigger.microbatch == 0) return {};
  return fmt::format("it is of no micro-batch, and names {}", trigger.microbatch);
}

std::string TablesOfEntered(const Plan& plan, const Trigger& trigger) {
  if (trigger.kind != TriggerKind::kPreForward && trigger.kind != TriggerKind::kPreBackward) return {};
  for (const Instruction& i : trigger.instructions) {
    const bool exists = i.segment >= 0 && i.segment < std::ssize(plan.segments);
    if (i.kind != InstructionKind::kCompute || !exists) continue;
    const Segment& segment = plan.segments[i.segment];
    const auto hooks_same = [&] {  // parameter groups of the same modules
      return trigger.unit >= 0 && plan.units[segment.unit].modules == plan.units[trigger.unit].modules;
    };
    if (segment.phase == SegmentPhase::kRecompute || segment.unit < 0 || segment.unit == trigger.unit ||
        hooks_same()) {
      continue;
    }
    // A recomputation that stops early goes on in the backward, and passes no point between.
    if (trigger.kind == TriggerKind::kPreForward && IsBackward(segment.phase)) continue;
    return fmt::format("{} runs in it, which is of {}", segment.name,
                       DisplayName(plan.units[segment.unit].fqn));
  }
  return {};
}

std::int32_t TablesOfOccurrences(const PlanStep& step) {
  std::map<std::tuple<TriggerKind, UnitId, std::int32_t>, std::int32_t> passed;
  for (std::size_t t = 0; t < step.triggers.size(); ++t) {
    const Trigger& trigger = step.triggers[t];
    if (trigger.occurrence != passed[{trigger.kind, trigger.unit, trigger.microbatch}]++) {
      return static_cast<std::int32_t>(t);
    }
  }
  return -1;
}

std::int32_t TablesOfLeft(const Plan& plan, const PlanStep& step) {
  std::map<std::pair<UnitId, std::int32_t>, std::int32_t> entered;  // by unit and micro-batch
  for (std::size_t t = 0; t < step.triggers.size(); ++t) {
    const Trigger& trigger = step.triggers[t];
    const bool is_group = trigger.unit >= 0 && plan.units[trigger.unit].modules.size() > 1;
    if (is_group || (trigger.kind != TriggerKind::kPreForward && trigger.kind != TriggerKind::kPostForward))
      continue;
    std::int32_t& depth = entered[{trigger.unit, trigger.microbatch}];
    depth += trigger.kind == TriggerKind::kPreForward ? 1 : -1;
    if (depth < 0) return static_cast<std::int32_t>(t);
  }
  return -1;
}

CallFault TablesOfCalls(const Plan& plan, std::int32_t step) {
  CallWalk walk(plan, ProgramOfStep(plan.strategy, step));
  const std::vector<Trigger>& triggers = plan.steps[step].triggers;
  for (std::size_t t = 0; t < triggers.size(); ++t) {
    if (IsOfStep(triggers[t].kind)) continue;
    std::string wrong = walk.Pass(triggers[t]);
    if (!wrong.empty()) return {static_cast<std::int32_t>(t), std::move(wrong)};
  }
  std::string wrong = walk.End();
  if (wrong.empty()) return {};
  return {static_cast<std::int32_t>(triggers.size()), std::move(wrong)};
}

void CheckTriggers(const Plan& plan, Reporter& reporter) {
  const bool says_order = !plan.passes.forwards.empty() || !plan.passes.backwards.empty();
  for (std::int32_t step = 0; step < std::ssize(plan.steps); ++step) {
    const PlanStep& of = plan.steps[step];
    std::int64_t subject = 1;
    const auto say = [&](std::int32_t t, const std::string& wrong) {
      const bool exists = t < std::ssize(of.triggers);
      const std::string trigger = exists ? Describe(plan, of.triggers[t]) : "the end";
      reporter.Add(Rule::kTables, {step, exists ? t : -1, -1}, subject++,
                   fmt::format("{} of step {}: {}", trigger, of.name, wrong));
    };
    for (std::int32_t t = 0; t < std::ssize(of.triggers); ++t) {
      for (const std::string& wrong : {TablesOfTrigger(of, t), TablesOfEntered(plan, of.triggers[t])}) {
        if (!wrong.empty()) say(t, wrong);
      }
    }
    if (const std::int32_t t = TablesOfOccurrences(of); t >= 0) {
      say(t,
          fmt::format("its occurrence {} is not how often it was passed before", of.triggers[t].occurrence));
    }
    if (const std::int32_t t = TablesOfLeft(plan, of); t >= 0)
      say(t, "it leaves a forward that is not entered");
    if (!says_order) continue;
    if (const CallFault fault = TablesOfCalls(plan, step); fault.trigger >= 0) say(fault.trigger, fault.what);
  }
}

}  // namespace shardplan::verifier
