// SPDX-License-Identifier: Apache-2.0
#include "training/off_plan/fallback.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/plan_text.h"
#include "training/failure.h"

namespace shardplan::executor {
namespace {

bool IsOfBackward(TriggerKind kind) {
  return kind == TriggerKind::kPreBackward || kind == TriggerKind::kPostBackward ||
         kind == TriggerKind::kBackwardEnd;
}

}  // namespace

std::string TriggerText(const Plan& plan, const TriggerKey& key) {
  Trigger trigger;
  trigger.kind = key.kind;
  trigger.unit = key.unit;
  trigger.microbatch = key.microbatch;
  return shardplan::Describe(plan, trigger);
}

void Fallback::OpenBackward::Before(std::int64_t next, std::vector<Passed>& log) {
  if (!passed || ends || next == id) return;
  log.push_back({.kind = TriggerKind::kBackwardEnd, .unit = -1, .grads = {}, .keeps = keeps, .seen = false});
  *this = {};
}

void Fallback::OpenBackward::Note(const Passed& point, std::int64_t of) {
  if (point.kind == TriggerKind::kBackwardEnd) {
    *this = {};
  } else if (of != -1) {
    passed = true;
    ends = ends || point.kind == TriggerKind::kPreBackward;
    keeps = point.keeps;
    id = of;
  }
}

void Fallback::NoteModule(const Passed& passed) {
  open_.Before(torch::autograd::get_current_graph_task_id(), log_);
  log_.push_back(passed);
}

bool Fallback::IsAsPlanned(PlanPosition next, TriggerKind kind, UnitId unit) const {
  const Trigger& expected = order_.At(next);
  return expected.kind == kind && expected.unit == unit && MissingGradient(next).empty() &&
         ExtraGradient(next).empty();
}

std::string Fallback::ExtraGradient(PlanPosition next) const {
  for (const SegmentGrad& left : order_.GradientsLeftAt(next)) {
    if (units_[left.unit].parameters[left.parameter]->unsharded_grad().defined())
      return ParameterText(plan_, left.unit, left.parameter);
  }
  return {};
}

std::string Fallback::MissingGradient(PlanPosition next) const {
  for (const BufferId taken : order_.GradientsTakenAt(next)) {
    const UnitId unit = plan_.buffers[taken].unit;
    if (units_[unit].flat) continue;  // what a backward does not reach has a gradient of zeros
    for (const std::int32_t p : buffer_parameters_[taken]) {
      if (!units_[unit].parameters[p]->unsharded_grad().defined()) return ParameterText(plan_, unit, p);
    }
  }
  return {};
}

void Fallback::Begin(const std::string& found, const std::string& expected, Replayer& replayer,
                     const std::function<void()>& publish, const std::vector<ModulePassed>& modules) {
  deviation_ = fmt::format("the model deviates from the plan: found {}, expected {} ({})", found, expected,
                           replayer.Where());
  {
    const ReleaseLock unlocked(lock_);
    OrThrow(replayer.Leave());
  }
  publish();
  const PlanPosition now{replayer.step_index(), replayer.trigger_index()};
  open_ = {};
  log_ = PlannedLog(now, modules, open_);
  if (open_.passed) open_.id = torch::autograd::get_current_graph_task_id();
  seen_.assign(units_.size(), {});
  for (const Passed& passed : log_) {
    for (const SegmentGrad& grad : passed.grads) {
      const std::vector<Seen> there = Gradients(grad.unit);
      if (there.empty()) continue;
      seen_[grad.unit].resize(there.size());
      seen_[grad.unit][grad.parameter] = there[grad.parameter];
    }
  }
  backwards_left_ = BackwardsFrom(now);
  on_demand_.TakeOver();
  on_demand_.ReducePartial();
  active_ = true;
}

int Fallback::BackwardsFrom(PlanPosition now) const {
  const std::vector<Trigger>& triggers = plan_.steps[now.step].triggers;
  return static_cast<int>(
      std::count_if(triggers.begin() + now.trigger, triggers.end(),
                    [](const Trigger& trigger) { return trigger.kind == TriggerKind::kBackwardEnd; }));
}

std::vector<Fallback::Passed> Fallback::PlannedLog(PlanPosition until,
                                                   const std::vector<ModulePassed>& modules) const {
  OpenBackward open;
  return PlannedLog(until, modules, open);
}

std::vector<Fallback::Passed> Fallback::PlannedLog(PlanPosition until,
                                                   const std::vector<ModulePassed>& modules,
                                                   OpenBackward& open) const {
  std::vector<Passed> log;
  auto next = modules.begin();
  const auto add_modules = [&](std::int32_t before) {
    for (; next != modules.end() && next->before.trigger <= before; ++next) {
      if (next->before.step == until.step) log.push_back(next->passed);
    }
  };
  std::vector<SegmentGrad> made;  // since the last point; those of a trigger's compute come after it
  for (std::int32_t t = 0; t < until.trigger; ++t) {
    add_modules(t);
    const Trigger& trigger = plan_.steps[until.step].triggers[t];
    const std::int64_t backward = IsOfBackward(trigger.kind) ? trigger.microbatch : -1;
    open.Before(backward, log);
    log.push_back({trigger.kind, trigger.unit, std::exchange(made, {}),
                   order_.KeepsGradients(PlanPosition{until.step, t})});
    open.Note(log.back(), backward);
    for (const Instruction& i : trigger.instructions) {
      if (i.kind != InstructionKind::kCompute) continue;
      const std::vector<SegmentGrad>& grads = plan_.segments[i.segment].grads;
      made.insert(made.end(), grads.begin(), grads.end());
    }
  }
  add_modules(until.trigger);
  return log;
}

// A gather or a reduction that some ranks do not come to, or come to with another unit, has no end, or a bad
// one.
void Fallback::CheckTogether(TriggerKind kind, UnitId unit) {
  constexpr std::int64_t kKinds = 32;
  const std::int64_t number =
      ((unit + 1) * kKinds + static_cast<std::int64_t>(kind)) * 2 + (reduces_(unit) ? 1 : 0);
  if (on_demand_.Alike(number)) return;
  const std::string here = fmt::format("{}{}, on demand", TriggerText(plan_, {kind, unit, 0}),
                                       reduces_(unit) ? "" : " without a reduction");
  throw TrainingError(ErrorCode::kNegative, "the ranks go different ways: " + in_words_(here));
}

void Fallback::Pass(TriggerKind kind, UnitId unit, bool full_precision) {
  CheckTogether(kind, unit);
  const std::int64_t backward = torch::autograd::get_current_graph_task_id();
  open_.Before(backward, log_);
  log_.push_back({kind, unit, {}, !reduces_(unit)});
  open_.Note(log_.back(), backward);
  switch (kind) {
    case TriggerKind::kPreForward:
    case TriggerKind::kPreBackward:
      return on_demand_.Unshard(unit, full_precision);
    case TriggerKind::kPostForward:
      return units_[unit].in_backward || torch::autograd::get_current_graph_task_id() != -1
                 ? void()
                 : on_demand_.Reshard(unit);
    case TriggerKind::kPostBackward:
      TakeGradients(unit);
      return on_demand_.Reshard(unit);
    case TriggerKind::kBackwardEnd:
      return EndBackward();
    default:
      return;
  }
}

// A gradient that is kept where autograd adds to it is found again later: it was made once, unless it was
// added to.
void Fallback::TakeGradients(UnitId unit) {
  const bool flat = units_[unit].flat != nullptr;
  const std::vector<Seen> before = Gradients(unit);
  const std::vector<std::int32_t> made = reduces_(unit) ? on_demand_.Reduce(unit) : on_demand_.Keep(unit);
  for (const std::int32_t parameter : made) {
    if (flat || seen_[unit].empty() || seen_[unit][parameter] != before[parameter])
      log_.back().grads.push_back({unit, parameter});
  }
  seen_[unit] = Gradients(unit);
}

std::vector<Fallback::Seen> Fallback::Gradients(UnitId unit) const {
  std::vector<Seen> gradients;
  if (units_[unit].flat) return gradients;
  for (const auto& parameter : units_[unit].parameters) {
    const at::Tensor& grad = parameter->unsharded_grad();
    gradients.push_back(grad.defined() ? Seen{grad.unsafeGetTensorImpl(), grad._version()} : Seen{});
  }
  return gradients;
}

void Fallback::EndBackward() {
  for (const UnitId unit : on_demand_.UnitsWithGradients()) TakeGradients(unit);
  on_demand_.EndBackward();
  on_demand_.ReshardAll();
  --backwards_left_;
}

void Fallback::EndStep() {
  seen_.clear();
  open_.Before(-1, log_);
  for (const UnitId unit : on_demand_.UnitsWithGradients()) on_demand_.Reduce(unit);
  on_demand_.ReshardAll();
  active_ = false;
  const HoldLock held(lock_);
  const std::function<void()> on_step_end = on_step_end_;  // it may end this
  on_step_end();
}

void Fallback::Abandon() {
  active_ = false;
  log_.clear();
  seen_.clear();
}

}  // namespace shardplan::executor
