// SPDX-License-Identifier: Apache-2.0
#include "fsdp1_host_gradients.h"

#include <algorithm>

namespace shardplan::conformance {

bool HoldsPiece(const Plan& plan, const Unit& unit, const UnitParameter& parameter) {
  if (unit.shard_communicator < 0) return true;
  return parameter.flat_offset < unit.flat_numel / plan.communicators[unit.shard_communicator].size;
}

HostGradients::HostGradients(const Plan& plan)
    : original_parameters_(plan.strategy.fsdp1.use_orig_params), units_(plan.units.size()) {
  const Fsdp1Sharding sharding = plan.strategy.fsdp1.sharding;
  reshards_after_forward_ =
      sharding != Fsdp1Sharding::kShardGradOp && sharding != Fsdp1Sharding::kHybridShardZero2;
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.role != BufferRole::kParamSharded || buffer.unit < 0) continue;
    const Unit& unit = plan.units[buffer.unit];
    units_[buffer.unit].offloads = buffer.memory != MemoryKind::kDevice && unit.shard_communicator >= 0;
    State& state = units_[buffer.unit];
    state.trains = std::ranges::any_of(unit.parameters, &UnitParameter::requires_grad);
    state.holds = std::ranges::any_of(unit.parameters, [&](const UnitParameter& parameter) {
      return parameter.requires_grad && HoldsPiece(plan, unit, parameter);
    });
  }
}

// _reset_flat_param_grad_info_if_needed
void HostGradients::RootPreForward() {
  if (!original_parameters_) return;
  for (State& unit : units_) {
    if (!unit.shown) unit.flat = unit.unsharded = false;
    unit.forgotten = unit.forgotten || (!unit.holds && !unit.unsharded);
  }
}

void HostGradients::Reshard(UnitId id, bool in_forward, bool grad_enabled) {
  State& unit = units_[id];
  unit.sharded_now = true;
  unit.skipped_views = original_parameters_ && in_forward && grad_enabled && !reshards_after_forward_;
  if (original_parameters_ && unit.holds && in_forward && !unit.skipped_views) unit.shown = true;
}

// _writeback_orig_params
void HostGradients::Unshard(UnitId id) {
  State& unit = units_[id];
  if (unit.shown && unit.sharded_now && !unit.skipped_views && !unit.unsharded) unit.flat = true;
  unit.sharded_now = false;
}

// prepare_gradient_for_backward
void HostGradients::PreBackward(UnitId id) {
  State& unit = units_[id];
  unit.saved = unit.saved || unit.flat;
  unit.flat = false;
}

void HostGradients::Accumulate(UnitId id) { units_[id].unsharded = units_[id].shown = true; }

bool HostGradients::Offload(UnitId id) {
  State& unit = units_[id];
  const bool adds = unit.offloads && unit.saved;
  unit.unsharded = false;
  unit.saved = true;
  unit.shown = unit.holds || !original_parameters_;
  return adds;
}

void HostGradients::Reduce(UnitId id) {
  State& unit = units_[id];
  unit.dropped = unit.forgotten;
  unit.forgotten = unit.unsharded = false;
}

void HostGradients::StepInBackward(UnitId id) {
  State& unit = units_[id];
  unit.shown = unit.flat = unit.saved = unit.unsharded = false;
}

// prepare_gradient_for_optim, of every unit that trains
void HostGradients::BackwardEnd(bool synchronised) {
  if (!synchronised) return;
  for (State& unit : units_) {
    unit.flat = unit.flat || (unit.offloads && unit.trains && !unit.unsharded);
    unit.saved = false;
  }
}

void HostGradients::ZeroGrad() {
  for (State& unit : units_) {
    unit.shown = false;
    if (!original_parameters_) unit.flat = unit.unsharded = false;
  }
}

}  // namespace shardplan::conformance
