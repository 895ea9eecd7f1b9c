// SPDX-License-Identifier: Apache-2.0
#include "training/parameters/gradient_handover.h"

#include <algorithm>
#include <utility>

#include "training/failure.h"

namespace shardplan::executor {

Status GradientHandover::Ready(UnitId unit, BufferId buffer) {
  const auto& parameters = units_[unit].parameters;
  const auto is_waited_for = [&](std::int32_t p) { return parameters[p]->HasGradHooks(); };
  if (!units_[unit].flat && std::ranges::any_of(buffer_parameters_[buffer], is_waited_for)) {
    return PublishInBackward(unit, buffer);
  }
  const auto same = [&](const Kept& kept) { return kept.buffer == buffer; };
  if (std::ranges::none_of(kept_, same)) kept_.push_back({unit, buffer});
  return {};
}

void GradientHandover::PublishAll(bool zeros) {
  const HoldLock held(lock_);
  for (const Kept& kept : kept_) {
    OrThrow(Publish(kept.unit, kept.buffer));
    if (!units_[kept.unit].flat) published_.push_back(kept);
  }
  for (const UnitState& unit : units_) {
    if (unit.flat && (zeros || !kept_.empty())) unit.flat->PublishZeros();
  }
  kept_.clear();
}

bool GradientHandover::IsDropped() const {
  return std::ranges::any_of(published_, [&](const Kept& published) {
    const auto& parameters = units_[published.unit].parameters;
    return device_.Part(published.buffer, 0).defined() &&
           std::ranges::any_of(buffer_parameters_[published.buffer],
                               [&](std::int32_t p) { return !parameters[p]->sharded_grad().defined(); });
  });
}

// The lock is held.
Status GradientHandover::Publish(UnitId unit, BufferId buffer) {
  if (units_[unit].flat) return PublishFlat(unit, buffer);
  for (const std::int32_t parameter : buffer_parameters_[buffer]) {
    Result<at::Tensor> local = device_.ShardedView(buffer, parameter, rank_);
    if (!local) return std::unexpected(std::move(local.error()));
    if (Status status = units_[unit].parameters[parameter]->PublishGrad(*local); !status) return status;
  }
  return {};
}

Status GradientHandover::PublishInBackward(UnitId unit, BufferId buffer) {
  if (plan_.buffers[buffer].role == BufferRole::kGradHost) {  // the host reads what is still on its way
    if (Result<bool> there = device_.Synchronize(); !there) return std::unexpected(std::move(there.error()));
  }
  Status status;
  const Status ran = device_.RunOn(std::max(units_[unit].reduction_stream, 0), [&] {
    const InsideUserCode guards(lock_);
    status = Publish(unit, buffer);
    if (!status) return;
    for (const std::int32_t parameter : buffer_parameters_[buffer]) {
      const ModelParameter& p = *units_[unit].parameters[parameter];
      if (p.HasGradHooks()) p.RunGradHooks();
    }
  });
  return ran ? status : ran;
}

// A backward may end with another buffer than it reduced into: kept in low precision, offloaded. The last one
// that is alive counts.
Status GradientHandover::PublishFlat(UnitId unit, BufferId buffer) {
  BufferId last = -1;
  for (const Kept& kept : kept_) {
    if (kept.unit == unit && device_.Part(kept.buffer, 0).defined()) last = kept.buffer;
  }
  if (buffer != last) return {};
  Result<at::Tensor> local = device_.ShardedView(buffer, 0, rank_);
  return local ? units_[unit].flat->PublishGradient(*local)
               : Status(std::unexpected(std::move(local.error())));
}

Status GradientHandover::StepInBackward(UnitId unit, std::int32_t parameter, StreamId stream) {
  if (unit < 0 || parameter < 0 || !units_[unit].flat) return {};
  Status status;
  const Status ran = device_.RunOn(std::max(stream, 0), [&] {
    const InsideUserCode guards(lock_);
    const std::vector<Kept> kept = kept_;
    for (const Kept& gradients : kept) {
      if (gradients.unit == unit && status) status = PublishFlat(unit, gradients.buffer);
    }
    std::erase_if(kept_, [&](const Kept& gradients) { return gradients.unit == unit; });
    if (status) status = units_[unit].flat->StepInBackward(parameter);
  });
  return ran ? status : ran;
}

}  // namespace shardplan::executor
