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
  changes_.Adopt();
  gathers_->Unshard(unit);
}

void Runtime::Reshard(UnitId unit) {
  if (units_[unit].unplanned) return gathers_->Reshard(unit);
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

Status Runtime::ShardedGradientsReady(UnitId unit, BufferId buffer) { return handover_.Ready(unit, buffer); }

}  // namespace shardplan::python
