// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/param_groups.h"

#include <algorithm>
#include <variant>

#include "policy/fsdp2/on_demand.h"
#include "shardplan/schemas/assert.h"
#include "units/partition.h"

namespace shardplan::fsdp2 {
namespace {

// The gradients that a stretch of a backward makes. Returns, ascending, the parameters that had one already.
std::vector<ParameterId> AddGrads(const PolicyInput& input, const EventRange& range,
                                  const ParamGroups& groups) {
  std::vector<ParameterId> accumulating;
  const Pass& pass = input.trace.backwards[range.pass];
  for (std::int32_t i = range.begin; i < range.end; ++i) {
    const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
    if (grad == nullptr) continue;
    const UnitParameterRef owner = OwnerOf(input.partition, grad->parameter, -1);
    if (owner.unit < 0) continue;
    SHARDPLAN_ASSERT(groups[owner.unit] != nullptr, "a unit that owns a parameter has a group");
    if (!groups[owner.unit]->unsharded_grads().Add(owner.parameter)) accumulating.push_back(grad->parameter);
  }
  std::ranges::sort(accumulating);
  return accumulating;
}

}  // namespace

void SetUpGroups(const PolicyInput& input, const ParamGroups& groups, ProgramBuilder& program) {
  for (std::size_t u = 0; u < groups.size(); ++u) {
    if (groups[u] != nullptr) groups[u]->SetUp();
    program.plan().units[u].gradient_divide_factor = groups[u] != nullptr
                                                         ? groups[u]->settings().gradient_divide_factor
                                                         : input.strategy.fsdp2.gradient_divide_factor;
  }
}

void Compute(const PolicyInput& input, const HookPoint& event, UnitId backward_unit,
             const ParamGroups& groups, ProgramBuilder& program) {
  if (!event.range.backward) {
    program.Compute(event, {}, {});
    return;
  }
  std::vector<UnitId> reads;
  const std::vector<UnitId> units =
      backward_unit < 0 ? std::vector<UnitId>() : GroupsOf(input.partition, backward_unit);
  for (const UnitId unit : units) {
    if (groups[unit] != nullptr && groups[unit]->is_unsharded()) reads.push_back(unit);
  }
  program.Compute(event, AddGrads(input, event.range, groups), reads);
}

SteppedUnit SteppedBy(const FsdpParamGroup& group) {
  SteppedUnit stepped{.unit = group.scope().id(), .parameters = {}};
  for (const auto& [parameter, grad] : group.sharded_grads().state().grads) {
    stepped.parameters.push_back(parameter);
  }
  return stepped;
}

void StepOptimizer(const ParamGroups& groups, OptimizerMemory& optimizer) {
  std::vector<SteppedUnit> units;
  for (const FsdpParamGroup* group : groups) {
    if (group == nullptr || group->sharded_grads().state().grads.empty()) continue;
    units.push_back(SteppedBy(*group));
  }
  optimizer.Step(units);
}

void ZeroGrad(const HookPoint& event, const ParamGroups& groups, ProgramBuilder& program) {
  program.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  program.SetReason("user");
  program.Emit(InstructionKind::kZeroGrad, kHost);
  for (FsdpParamGroup* group : groups) {
    if (group != nullptr) group->sharded_grads().Clear();
  }
}

Status EmitProcedures(const ParamGroups& groups, OptimizerMemory* optimizer_in_backward, FaultList& faults) {
  for (FsdpParamGroup* group : groups) {
    if (group == nullptr) continue;
    const Status emitted = EmitProcedures(group->scope(), group->settings(), optimizer_in_backward, faults);
    if (!emitted) return emitted;
  }
  return {};
}

}  // namespace shardplan::fsdp2
