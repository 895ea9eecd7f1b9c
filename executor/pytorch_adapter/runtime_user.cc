// Runtime's part for what the user does at a point of the plan: calls, hooks on gradients, collectives of
// their own.
#include <fmt/format.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "python_error.h"
#include "runtime.h"

namespace shardplan::python {

bool Runtime::PassUserCall(UnitId unit) {
  const std::optional<PlanPosition> call = order_.NextUserCall(Position(), unit);
  if (!call) return false;
  for (bool last = false; !last;) {
    last = replayer_->trigger_index() == call->trigger && replayer_->step_index() == call->step;
    Fire(executor::TriggerKey(replayer_->Expected()));
  }
  return true;
}

void Runtime::Unshard(UnitId unit) {
  if (PassUserCall(unit) || units_[unit].unsharded) return;
  if (!BetweenSteps()) {
    throw std::runtime_error(fmt::format("shardplan: the plan has no call of unshard of {} here ({})",
                                         plan_->units[unit].fqn, Where()));
  }
  AdoptReplacements();
  UnshardUnplanned(unit);
}

void Runtime::Reshard(UnitId unit) {
  if (units_[unit].unplanned) return ReshardUnplanned(unit);
  if (PassUserCall(unit) || !units_[unit].unsharded) return;
  throw std::runtime_error(fmt::format("shardplan: the plan has no call of reshard of {} here ({})",
                                       plan_->units[unit].fqn, Where()));
}

void Runtime::SetReductionHook(UnitId unit, PyRef hook) { units_[unit].reduction_hook = std::move(hook); }

void Runtime::SetCustomCollective(UnitId unit, CollectiveKind kind, PyRef comm) {
  collectives_->Set(unit, kind, std::move(comm));
}

Status Runtime::GradientsReduced(UnitId unit, BufferId buffer, StreamId stream) {
  UnitState& state = units_[unit];
  state.reduction_stream = stream;
  if (!state.reduction_hook) [[likely]] {
    return {};
  }
  Status status;
  const Status ran = device_->RunOn(stream, [&] {
    const InsideUserCode guards;
    const PyRef tensor = PyRef::Steal(THPVariable_Wrap(device_->Part(buffer, 0)));
    const PyRef result =
        PyRef::Steal(tensor ? PyObject_CallOneArg(state.reduction_hook.get(), tensor.get()) : nullptr);
    if (!result) status = PythonError("the hook on reduced gradients");
  });
  return ran ? status : ran;
}

// The GIL is held.
Status Runtime::Publish(UnitId unit, BufferId buffer) {
  if (units_[unit].flat) return PublishFlatGradient(unit, buffer);
  for (const std::int32_t parameter : ParametersOf(buffer)) {
    Result<at::Tensor> local = device_->ShardedView(buffer, parameter, rank_);
    if (!local) return std::unexpected(std::move(local.error()));
    if (!units_[unit].parameters[parameter].PublishGrad(*local)) {
      return PythonError("handing a gradient to its parameter");
    }
  }
  return {};
}

// Gradients are handed over when the backward ends, all at once, unless the user waits for them with hooks on
// the sharded parameters (an optimizer that steps inside the backward).
Status Runtime::ShardedGradientsReady(UnitId unit, BufferId buffer) {
  const std::vector<ModelParameter>& parameters = units_[unit].parameters;
  const auto is_waited_for = [&](std::int32_t p) { return parameters[p].HasGradHooks(); };
  if (!units_[unit].flat && std::ranges::any_of(ParametersOf(buffer), is_waited_for)) {
    return PublishInBackward(unit, buffer);
  }
  const auto same = [&](const ReadyGradients& ready) { return ready.buffer == buffer; };
  if (std::none_of(ready_.begin(), ready_.end(), same)) ready_.push_back({unit, buffer});
  return {};
}

Status Runtime::PublishInBackward(UnitId unit, BufferId buffer) {
  if (plan_->buffers[buffer].role == BufferRole::kGradHost) {  // the host reads what is still on its way
    if (Result<bool> there = device_->Synchronize(); !there) return std::unexpected(std::move(there.error()));
  }
  Status status;
  const Status ran = device_->RunOn(std::max(units_[unit].reduction_stream, 0), [&] {
    const InsideUserCode guards;
    status = Publish(unit, buffer);
    if (!status) return;
    for (const std::int32_t parameter : ParametersOf(buffer)) {
      const ModelParameter& p = units_[unit].parameters[parameter];
      if (p.HasGradHooks()) p.RunGradHooks();
    }
  });
  return ran ? status : ran;
}

}  // namespace shardplan::python
