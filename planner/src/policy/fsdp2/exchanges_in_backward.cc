// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/exchanges_in_backward.h"

#include <map>

#include "policy/fsdp2/param_groups.h"

namespace shardplan::fsdp2 {

ExchangesInBackward::ExchangesInBackward(const PolicyInput& input, OptimizerMemory& optimizer)
    : optimizer_(optimizer) {
  const std::optional<Muon>& muon = input.strategy.optimizer.muon;
  if (!muon || !muon->begin_in_backward) return;
  for (const RecordedStep& step : input.steps) {
    std::map<UnitId, const HookPoint*> ends;
    for (const HookPoint& point : step.events) {
      if (point.kind == HookPointKind::kInputsGradDone) ends[point.unit] = &point;
      if (point.kind != HookPointKind::kOptimizerStep) continue;
      for (const auto& [unit, end] : ends) last_.insert(end);
      ends.clear();
    }
  }
}

void ExchangesInBackward::Pass(const HookPoint& point) {
  if (last_.contains(&point)) passed_.insert(point.unit);
  if (point.kind == HookPointKind::kOptimizerStep) passed_.clear();
}

void ExchangesInBackward::Reduced(const FsdpParamGroup& group) {
  const EventId reduced = group.reduced();
  if (reduced < 0 || !passed_.contains(group.scope().id())) return;
  optimizer_.Reduced(SteppedBy(group), reduced);
}

}  // namespace shardplan::fsdp2
