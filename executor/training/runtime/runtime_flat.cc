// SPDX-License-Identifier: Apache-2.0
// Runtime's part for flat units.
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/layout.h"
#include "training/failure.h"
#include "training/runtime/runtime.h"

namespace shardplan::executor {

void Runtime::SetFlatShard(UnitId unit, at::Tensor shard) {
  for (std::size_t i = 0; i < plan_->buffers.size(); ++i) {
    const Buffer& buffer = plan_->buffers[i];
    if (buffer.role != BufferRole::kParamSharded || buffer.unit != unit) continue;
    OrThrow(device_->SetParts(static_cast<BufferId>(i), {shard}));
    // Unsharded, it is what the modules use.
    if (tables_.unsharded_buffer[unit] < 0) tables_.unsharded_buffer[unit] = static_cast<BufferId>(i);
  }
  shards_[unit] = {std::move(shard)};
}

std::shared_ptr<FlatGradient> Runtime::MakeFlatGradient(UnitId unit) {
  std::vector<bool> tracked;
  for (const UnitParameter& parameter : plan_->units[unit].parameters) {
    tracked.push_back(parameter.requires_grad);
  }
  // A frozen parameter of a unit that trains gets a gradient where the plan has one for it.
  for (std::size_t b = 0; b < plan_->buffers.size(); ++b) {
    const Buffer& buffer = plan_->buffers[b];
    if (buffer.unit != unit || buffer.role != BufferRole::kGradUnsharded) continue;
    for (const std::int32_t parameter : tables_.buffer_parameters[b]) tracked[parameter] = true;
  }
  std::function<bool(const FlatGradient::Gradients&)> add_alone;
  const Unit& planned = plan_->units[unit];
  if (planned.param_dtype != planned.orig_dtype || shards_[unit][0].device() != device_->torch_device()) {
    add_alone = [runtime = weak_from_this(), unit](const FlatGradient::Gradients& gradients) {
      const auto self = runtime.lock();
      return self && self->AddToAccumulated(unit, gradients);
    };
  }
  auto done = [runtime = weak_from_this(), unit] {
    if (const auto self = runtime.lock()) self->PostBackward(unit);
  };
  return std::make_shared<FlatGradient>(std::move(tracked), std::move(done), std::move(add_alone));
}

bool Runtime::HasZerosOnHost(UnitId unit, const FlatUnit::Options& options) const {
  const auto on_host = [&](const Buffer& buffer) {
    return buffer.unit == unit && buffer.role == BufferRole::kParamSharded &&
           buffer.memory != MemoryKind::kDevice;
  };
  return !options.original_parameters && options.trains && std::ranges::any_of(plan_->buffers, on_host);
}

void Runtime::SetFlatUnit(UnitId unit, std::unique_ptr<FlatUnit> flat) {
  units_[unit].flat = std::move(flat);
}

Status Runtime::ShardedParametersRead(UnitId unit, StreamId stream) {
  if (!units_[unit].flat) return {};
  const HoldLock held(lock_);
  return units_[unit].flat->WriteBack(
      [&](const std::function<void()>& copy) { return device_->RunOn(std::max(stream, 0), copy); });
}

// Whether the point that is being passed is in a forward.
bool Runtime::InForward() const {
  return (fallback_.active() ? fallback_.log().back().kind : now_.firing) == TriggerKind::kPreForward;
}

// New views in a forward; in a backward those of the forward, whose memory is there again.
Status Runtime::BindFlatViews(UnitId unit, BufferId buffer) {
  FlatUnit& flat = *units_[unit].flat;
  units_[unit].unsharded = true;
  const bool evaluates = units_[unit].unplanned && !fallback_.active();
  if (!evaluates && !InForward()) return flat.BindViewsAgain();
  if (plan_->buffers[buffer].role == BufferRole::kParamSharded) {  // not sharded: nothing is gathered
    if (Status status = ShardedParametersRead(unit, 0); !status) return status;
  }
  std::vector<at::Tensor> views;
  for (std::size_t i = 0; i < plan_->units[unit].parameters.size(); ++i) {
    Result<at::Tensor> view = device_->ParameterView(buffer, static_cast<std::int32_t>(i));
    if (!view) return std::unexpected(std::move(view.error()));
    views.push_back(std::move(*view));
  }
  return flat.BindViews(std::move(views), !evaluates);
}

// A parameter that this backward did not reach has a gradient of zeros, as in FSDP1.
Status Runtime::TakeFlatGradients(UnitId unit, BufferId buffer) {
  std::vector<at::Tensor> parts;
  for (const std::int32_t parameter : ParametersOf(buffer)) {
    parts.push_back(units_[unit].flat->gradient().gradient(parameter));
  }
  return device_->SetParts(buffer, std::move(parts));
}

// FSDP1's hook is on the gradient of an earlier use: the plan has no post_backward in this backward, and its
// end takes what has arrived.
bool Runtime::MissesPostBackward(UnitId unit) const {
  PlanPosition at = tables_.order.NextHooked(Position());
  for (; tables_.order.At(at).kind != TriggerKind::kBackwardEnd; at = tables_.order.After(at)) {
    const Trigger& trigger = tables_.order.At(at);
    if (trigger.kind == TriggerKind::kPostBackward && trigger.unit == unit) return false;
    if (trigger.kind == TriggerKind::kStepEnd) return false;
  }
  const auto is_of_unit = [&](BufferId buffer) { return plan_->buffers[buffer].unit == unit; };
  return std::ranges::any_of(tables_.order.GradientsTakenAt(at), is_of_unit);
}

// To the gradient that an earlier backward left unreduced, which the plan is to add this backward's to.
bool Runtime::AddToAccumulated(UnitId unit, const FlatGradient::Gradients& gradients) {
  const auto holds = [&](const Buffer& buffer) {
    return buffer.unit == unit && buffer.role == BufferRole::kGradUnshardedAccumulated &&
           device_->Part(static_cast<BufferId>(&buffer - plan_->buffers.data()), 0).defined();
  };
  const auto found = std::ranges::find_if(plan_->buffers, holds);
  if (found == plan_->buffers.end()) return false;
  const at::NoGradGuard no_grad;
  for (const std::int32_t parameter : shardplan::ParametersOf(*plan_, *found)) {
    if (!gradients[parameter].defined()) continue;
    const auto id = static_cast<BufferId>(found - plan_->buffers.begin());
    const Result<at::Tensor> sum = device_->ParameterView(id, parameter);
    if (!sum) Throw(sum.error());
    sum->add_(gradients[parameter]);
  }
  return true;
}

Status Runtime::OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) {
  if (on_demand_.has_gradients_under_way()) return on_demand_.StepInBackward(unit, parameter);
  return handover_.StepInBackward(unit, parameter, stream);
}

Status Runtime::ZeroGrad(UnitId zeroed) {
  const HoldLock held(lock_);
  if (zeroed < 0) handover_.Forget();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const bool meant = zeroed < 0 || zeroed == static_cast<UnitId>(unit);
    if (!meant) continue;
    if (units_[unit].flat) units_[unit].flat->ForgetGradient();
    for (const auto& parameter : units_[unit].parameters) parameter->ForgetGrad();
  }
  return {};
}

}  // namespace shardplan::executor
