// SPDX-License-Identifier: Apache-2.0
// Rule tables: segments, procedures and steps.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <variant>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/program.h"
#include "verifier/tables.h"

namespace shardplan::verifier {
namespace {

bool Holds(const Unit& unit, ParameterId parameter) {
  return std::ranges::find(unit.parameters, parameter, &UnitParameter::index) != unit.parameters.end();
}

// Parameters of the model that the segment's operators read.
std::set<ParameterId> ParametersRead(const Segment& segment) {
  std::set<ParameterId> parameters;
  for (const SegmentEntry& entry : segment.entries) {
    const auto* op = std::get_if<OperatorEvent>(&entry);
    if (op != nullptr) parameters.insert(op->parameters.begin(), op->parameters.end());
  }
  return parameters;
}

bool Trains(const Plan& plan, const Unit& unit, const UnitParameter& parameter) {
  if (parameter.requires_grad) return true;
  // The gradient of a flat parameter is one tensor: that of a frozen original parameter is zero in it.
  return unit.layout == LayoutKind::kFlat && plan.strategy.fsdp1.use_orig_params &&
         std::ranges::any_of(unit.parameters, &UnitParameter::requires_grad);
}

using enum ProcedureKind;
constexpr std::array kUnsharding = {kUnshard, kReshard};
constexpr std::array kFullPrecision = {kUnshardFullPrecision, kReshardFullPrecision};
constexpr std::array kKeeping = {kAccumulate, kAccumulateAgain, kReduceAccumulated, kReduceKept};

// By pass of the backward: parameters of the model.
using ByPass = std::map<std::int32_t, std::set<ParameterId>>;

// By pass: parameters whose gradient the pass allocates.
ByPass GradientsAllocated(const Plan& plan) {
  ByPass allocated;
  for (const Segment& segment : plan.segments) {
    if (!IsBackward(segment.phase)) continue;
    for (const SegmentEntry& entry : segment.entries) {
      const auto* born = std::get_if<AllocateEvent>(&entry);
      const bool is_gradient = born != nullptr && born->role == StorageRole::kParameterGrad;
      if (is_gradient) allocated[segment.pass].insert(born->parameter);
    }
  }
  return allocated;
}

// By pass: parameters whose gradient a segment of the pass makes.
ByPass GradientsMade(const Plan& plan) {
  ByPass made;
  for (const Segment& segment : plan.segments) {
    for (const SegmentGrad& grad : segment.grads) {
      made[segment.pass].insert(plan.units[grad.unit].parameters[grad.parameter].index);
    }
  }
  return made;
}

// The kinds of which some unit of the plan has one of the group.
std::set<ProcedureKind> KindsOf(const Plan& plan) {
  std::set<ProcedureKind> kinds;
  for (const Procedure& procedure : plan.procedures) kinds.insert(procedure.kind);
  for (const std::span<const ProcedureKind> group :
       {std::span<const ProcedureKind>(kUnsharding), std::span<const ProcedureKind>(kFullPrecision),
        std::span<const ProcedureKind>(kKeeping)}) {
    const bool has_one = std::ranges::any_of(group, [&](ProcedureKind kind) { return kinds.contains(kind); });
    if (has_one) kinds.insert(group.begin(), group.end());
  }
  if (kinds.contains(kAccumulate)) kinds.insert(kReduce);
  return kinds;
}

}  // namespace

std::string TablesOfReads(const Plan& plan, const Segment& segment) {
  for (const ParameterId parameter : ParametersRead(segment)) {
    const auto holds = [&](const Unit& unit) { return Holds(unit, parameter); };
    const auto owner = std::ranges::find_if(plan.units, holds);
    if (owner == plan.units.end()) continue;  // of no unit: ignored parameters
    const bool says =
        std::ranges::any_of(segment.reads, [&](UnitId unit) { return holds(plan.units[unit]); });
    if (!says) {
      return fmt::format("its operators read parameter {}, and it does not say that it reads {}", parameter,
                         DisplayName(owner->fqn));
    }
  }
  return {};
}

std::string TablesOfGradients(const Plan& plan, const Segment& segment) {
  for (const SegmentGrad& grad : segment.grads) {
    const Unit& unit = plan.units[grad.unit];
    const UnitParameter& parameter = unit.parameters[grad.parameter];
    if (Trains(plan, unit, parameter)) continue;
    return fmt::format("it makes the gradient of {} of {}, which is frozen (requires_grad false)",
                       parameter.fqn, DisplayName(unit.fqn));
  }
  return {};
}

std::vector<UnmadeGradient> TablesOfUnmadeGradients(const Plan& plan) {
  ByPass made = GradientsMade(plan);
  std::vector<UnmadeGradient> unmade;
  for (const auto& [pass, parameters] : GradientsAllocated(plan)) {
    for (const ParameterId parameter : parameters) {
      const auto holds = [&](const Unit& unit) { return Holds(unit, parameter); };
      const auto owner = std::ranges::find_if(plan.units, holds);
      if (owner == plan.units.end() || made[pass].contains(parameter)) continue;
      unmade.push_back({pass, parameter, static_cast<UnitId>(owner - plan.units.begin())});
    }
  }
  return unmade;
}

std::vector<ProcedureKind> TablesOfProcedures(const Plan& plan, UnitId unit) {
  const PolicyKnobs& policy = KnobsOf(plan.strategy.policy);
  std::vector<ProcedureKind> missing;
  if (policy.name != plan.strategy.policy || plan.units[unit].parameters.empty()) return missing;
  const std::set<ProcedureKind> kinds = KindsOf(plan);
  for (const ProcedureKind kind : policy.procedures(plan.units[unit])) {
    if (kinds.contains(kind) && FindProcedure(plan, kind, unit) == nullptr) missing.push_back(kind);
  }
  return missing;
}

std::int32_t WaitBeforeRecordInProcedure(const Procedure& procedure) {
  std::set<EventId> recorded;
  for (std::size_t k = 0; k < procedure.instructions.size(); ++k) {
    const Instruction& i = procedure.instructions[k];
    if (DescriptionOf(i.kind).order == OrderEffect::kRecords) recorded.insert(i.event);
    const OrderEffect order = DescriptionOf(i.kind).order;
    const bool waits = order == OrderEffect::kWaits || order == OrderEffect::kHostWaits;
    if (waits && !recorded.contains(i.event)) return static_cast<std::int32_t>(k);
  }
  return -1;
}

bool SteadyStateOfLazyInit(const Plan& plan, std::int32_t step, const Trigger& trigger) {
  return trigger.kind == TriggerKind::kLazyInit && step >= plan.steady_step;
}

std::int32_t TablesOfRepeatedStep(const Plan& plan) {
  const auto steps = static_cast<std::int32_t>(plan.steps.size());
  const std::int32_t cycle = steps - plan.steady_step;
  const std::int32_t end = std::max(steps, static_cast<std::int32_t>(plan.strategy.program.size())) + cycle;
  for (std::int32_t step = steps; step < end; ++step) {
    const std::int32_t runs = plan.steady_step + (step - steps) % cycle;
    if (ProgramOfStep(plan.strategy, step) != ProgramOfStep(plan.strategy, runs)) return step;
  }
  return -1;
}

namespace {

void CheckProcedures(const Plan& plan, Reporter& reporter) {
  for (std::size_t u = 0; u < plan.units.size() && !plan.procedures.empty(); ++u) {
    for (const ProcedureKind kind : TablesOfProcedures(plan, static_cast<UnitId>(u))) {
      reporter.Add(
          Rule::kTables, {}, static_cast<std::int64_t>(u * 16) + static_cast<int>(kind),
          fmt::format("unit {} has no procedure {}: the plan does it on demand with other units, or has "
                      "the others that go with it",
                      DisplayName(plan.units[u].fqn), Name(kind)));
    }
  }
}

}  // namespace

void CheckProgramTables(const Plan& plan, Reporter& reporter) {
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    const Segment& segment = plan.segments[s];
    for (const auto& of_segment : {TablesOfReads, TablesOfGradients}) {
      const std::string wrong = of_segment(plan, segment);
      if (wrong.empty()) continue;
      reporter.Add(Rule::kTables, {}, -static_cast<std::int64_t>(s) - 1,
                   fmt::format("segment {}: {}", segment.name, wrong));
    }
  }
  const auto first = static_cast<std::int64_t>(plan.units.size()) * 16;  // subjects: behind the procedures'
  for (std::int64_t k = first; const UnmadeGradient& gradient : TablesOfUnmadeGradients(plan)) {
    reporter.Add(
        Rule::kTables, {}, k++,
        fmt::format("backward {} allocates the gradient of parameter {}, of {}, and none of its segments "
                    "makes it (grads)",
                    gradient.pass, gradient.parameter, DisplayName(plan.units[gradient.unit].fqn)));
  }
  CheckProcedures(plan, reporter);
  if (const std::int32_t step = TablesOfRepeatedStep(plan); step >= 0) {
    reporter.Add(Rule::kTables, {plan.steady_step, -1, -1}, 0,
                 fmt::format("the plan goes on with step {} (steady_step {}), and the strategy's program has "
                             "other calls in step {}",
                             plan.steps[plan.steady_step].name, plan.steady_step, step));
  }
  for (std::size_t step = 0; step < plan.steps.size(); ++step) {
    const std::vector<Trigger>& triggers = plan.steps[step].triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      const Position at = {static_cast<std::int32_t>(step), static_cast<std::int32_t>(t), -1};
      if (!SteadyStateOfLazyInit(plan, at.step, triggers[t])) continue;
      reporter.Add(Rule::kSteadyState, at, 0,
                   fmt::format("{} is passed in step {}, which repeats (steady_step {}): it is done once",
                               Describe(plan, triggers[t]), plan.steps[step].name, plan.steady_step));
    }
  }
}

}  // namespace shardplan::verifier
