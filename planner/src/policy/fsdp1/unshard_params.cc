// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/unshard_params.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policy/fsdp1/flat_param_grad.h"
#include "policy/fsdp1/runtime_utils.h"
#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::fsdp1 {
namespace {

// In the order in which the contexts of the units are entered.
std::vector<UnitId> UnitsUnder(const Context& context, const ModuleCall& call) {
  std::vector<UnitId> units;
  for (const UnitId unit : context.partition.states) {
    if (Reaches(call, context.UnitOf(unit).fqn)) units.push_back(unit);
  }
  return units;
}

bool Has(const ModuleCall& call, std::string_view flag) {
  return std::ranges::find(call.flags, flag) != call.flags.end();
}

// _validate_unshard_params_args, but for what CheckStrategy says. Flags are the arguments that are not at
// their defaults: `writeback` is true by default, the others are false.
Status ValidateUnshardParamsArgs(FsdpState& state, const ModuleCall& call, const std::vector<UnitId>& units) {
  const auto refuse = [](const char* why) { return MakeInputError("", std::string("FSDP1 refuses ") + why); };
  for (const UnitId unit : units) {
    const FlatParamHandle* handle = state.HandleOf(unit);
    if (handle == nullptr) continue;
    const FlatParamConfig& config = handle->config();
    if (Has(call, "offload_to_cpu") && !config.sharded) {
      return refuse("summon_full_params(offload_to_cpu) of parameters that are not sharded");
    }
    if (Has(call, "with_grads") && config.sharded && (handle->flat_param.grad.exists() || config.offloads)) {
      return refuse("summon_full_params(with_grads) of gradients that are not reduced, or on the host");
    }
  }
  return {};
}

// torch.cuda.synchronize()
void Synchronize(const Context& context) {
  const auto streams = static_cast<StreamId>(context.builder.plan().streams.size());
  for (StreamId stream = 0; stream < streams; ++stream) {
    context.SynchronizeStream(stream,
                              fmt::format("synchronize.{}", context.builder.plan().streams[stream].name));
  }
}

void EnterUnit(FsdpState& state, FlatParamHandle& handle, const ModuleCall& call) {
  handle.frees_when_summon_ends = handle.NeedsUnshard(kUnshardOnCompute);
  Unshard(state, handle, kUnshardOnCompute, "summon_full_params");
  if (Has(call, "with_grads") && handle.config().sharded) UnshardGrad(handle);
  if (Has(call, "offload_to_cpu")) handle.ToCpu();
}

void LeaveUnit(FsdpState& state, FlatParamHandle& handle) {
  handle.FromCpu();
  const bool free = std::exchange(handle.frees_when_summon_ends, false);
  Reshard(state, handle, free, /*grad_enabled=*/false, kUnshardOnCompute);
  ReshardGrad(handle);
}

}  // namespace

Status SummonFullParams(const Context& context, FsdpState& state, const HookPoint& event) {
  const ModuleCall& call = *event.call;
  if (!state.is_initialized && !call.module.empty()) {
    return MakeInputError(
        "",
        "a module whose parameters are summoned before the model has run is taken for a root "
        "of its own, and the model's first forward fails",
        call.module, "the root first, or a forward");
  }
  const bool enters = call.value.value_or(true);
  std::vector<UnitId> units = UnitsUnder(context, call);
  if (Status s = ValidateUnshardParamsArgs(state, call, units); !s) return s;
  if (!enters) std::ranges::reverse(units);
  context.builder.SetReason("summon_full_params");
  if (enters) ResetFlatParamGradInfoIfNeeded(context, state);
  for (const UnitId unit : units) {
    context.builder.SetUnit(unit);
    if (enters) Synchronize(context);
    FlatParamHandle* handle = state.HandleOf(unit);
    if (handle == nullptr) continue;
    if (enters == handle->summoned) {
      return MakeInputError("", "summon_full_params is entered twice, or left before it is entered",
                            DisplayName(context.UnitOf(unit).fqn));
    }
    // Only while it enters and leaves: what the program does inside the context, the hooks of a forward say.
    const HandleTrainingState before =
        std::exchange(handle->training_state, HandleTrainingState::kSummonFullParams);
    if (enters) {
      EnterUnit(state, *handle, call);
    } else {
      LeaveUnit(state, *handle);
    }
    handle->training_state = before;
    handle->summoned = enters;
  }
  return {};
}

}  // namespace shardplan::fsdp1
