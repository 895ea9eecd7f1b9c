// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/policy.h"

#include <algorithm>
#include <utility>

#include "policy/fsdp1/backward_hooks.h"
#include "policy/fsdp1/forward_hooks.h"
#include "policy/fsdp1/known_faults.h"
#include "policy/fsdp1/on_demand.h"
#include "policy/fsdp1/runtime_utils.h"
#include "policy/fsdp1/unshard_params.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {

std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<fsdp1::Fsdp1Policy>(input, builder);
}

namespace fsdp1 {
namespace {

// Hybrid sharding, in PyTorch's words.
bool UsesHybridSharding(const UnitChoice& choice) {
  return choice.unit.shard_communicator >= 0 && choice.unit.replicate_communicator >= 0;
}

}  // namespace

Fsdp1Policy::Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder)
    : optimizer_(input.trace, input.strategy, input.partition, builder),
      context_{.trace = input.trace,
               .index = input.index,
               .partition = input.partition,
               .strategy = input.strategy,
               .builder = builder,
               .optimizer = optimizer_,
               .faults_seen = faults_seen_,
               .streams = {},
               .flat_params = {}} {}

Status Fsdp1Policy::SetUp() {
  InitStreams();
  if (Status status = CheckKnobs(); !status) return status;
  if (Status status = optimizer_.Check(); !status) return status;
  return MakeHandles();
}

void Fsdp1Policy::InitStreams() {
  const bool hybrid = std::ranges::any_of(context_.partition.units, UsesHybridSharding);
  const std::int32_t priority = hybrid && context_.strategy.fsdp1.limit_all_gathers ? -1 : 0;
  ProgramBuilder& builder = context_.builder;
  context_.streams.unshard = builder.Stream("unshard", priority);
  context_.streams.post_backward = builder.Stream("post_backward", priority);
  context_.streams.pre_unshard = builder.Stream("pre_unshard", priority);
  if (hybrid) context_.streams.all_reduce = builder.Stream("all_reduce");
}

// Settings that the runtime itself refuses.
Status Fsdp1Policy::CheckKnobs() const {
  const Fsdp1Knobs& knobs = context_.strategy.fsdp1;
  if (knobs.comm_hook == Fsdp1CommHook::kNone) return {};
  for (const UnitChoice& choice : context_.partition.units) {
    if (UsesHybridSharding(choice)) {
      return MakeInputError("/fsdp1/comm_hook", "FSDP1 has no communication hooks with hybrid sharding");
    }
    if (choice.unit.parameters.empty()) continue;
    const bool sharded = choice.unit.shard_communicator >= 0;
    if (knobs.comm_hook == Fsdp1CommHook::kAllReduce && sharded) {
      return MakeInputError("/fsdp1/comm_hook", "an all-reduce is no reduction for sharded gradients",
                            "allreduce_hook", "reduce_scatter_hook, or no_shard");
    }
    if (knobs.comm_hook == Fsdp1CommHook::kReduceScatter && !sharded) {
      return MakeInputError("/fsdp1/comm_hook",
                            "a reduce-scatter is no reduction for gradients that are not sharded",
                            "reduce_scatter_hook", "allreduce_hook");
    }
  }
  return {};
}

Status Fsdp1Policy::MakeHandles() {
  const std::size_t units = context_.partition.units.size();
  context_.flat_params.resize(units);
  state_.handles.resize(units);
  for (std::size_t u = 0; u < units; ++u) {
    const auto id = static_cast<UnitId>(u);
    if (context_.UnitOf(id).parameters.empty()) continue;
    Result<FlatParamConfig> config = MakeFlatParamConfig(context_.partition, context_.strategy, id);
    if (!config) return std::unexpected(config.error());
    context_.flat_params[u] = *config;
    state_.handles[u].emplace(context_, id);
  }
  return {};
}

Status Fsdp1Policy::On(const HookPoint& event) {
  switch (event.kind) {
    case HookPointKind::kSegment:
      OnSegment(event);
      break;
    case HookPointKind::kForwardBegin:
      OnForwardBegin(state_, event);
      break;
    case HookPointKind::kPreForward:
    case HookPointKind::kRecomputePreForward:
      PreForward(context_, state_, event);
      break;
    case HookPointKind::kPostForward:
    case HookPointKind::kRecomputePostForward:
      PostForward(context_, state_, event);
      break;
    case HookPointKind::kForwardEnd:
      OnForwardEnd(state_);
      break;
    case HookPointKind::kBackwardBegin:
      OnBackwardBegin(context_, state_, event);
      break;
    case HookPointKind::kPreBackward:
      PreBackwardHook(context_, state_, event);
      break;
    case HookPointKind::kUnitBackwardDone:
      OnUnitBackwardDone(state_, event);
      break;
    case HookPointKind::kInputsGradDone:
      PostBackwardReshardOnlyHook(context_, state_, event);
      break;
    case HookPointKind::kBackwardEnd:
      OnBackwardEnd(context_, state_, event);
      break;
    case HookPointKind::kOptimizerStep:
      OptimizerStep(event);
      break;
    case HookPointKind::kZeroGrad:
      ZeroGrad(event);
      break;
    case HookPointKind::kModuleCall:
      return UserCall(event);
    case HookPointKind::kParameterGradsDone:
      break;
  }
  return {};
}

// The model's own work. Autograd makes gradients of views in it.
void Fsdp1Policy::OnSegment(const HookPoint& event) {
  std::vector<UnitId> reads;
  if (event.range.backward) {
    const UnitId unit = state_.backward.unit;
    if (unit >= 0 && !state_.HandleOf(unit)->PointsToShard()) reads.push_back(unit);
    const Pass& pass = context_.trace.backwards[event.range.pass];
    for (std::int32_t i = event.range.begin; i < event.range.end; ++i) {
      const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
      if (grad == nullptr) continue;
      const UnitParameterRef owner = OwnerOf(context_.partition, grad->parameter, -1);
      if (owner.unit >= 0) state_.HandleOf(owner.unit)->flat_param.view_grads.insert(owner.parameter);
    }
  }
  context_.builder.Compute(event, {}, reads);
}

void Fsdp1Policy::OptimizerStep(const HookPoint& event) {
  context_.builder.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  std::vector<SteppedUnit> units;
  for (const std::optional<FlatParamHandle>& handle : state_.handles) {
    const bool steps = handle && handle->flat_param.has_sharded_grad && !state_.grads_zeroed;
    if (steps) units.push_back({.unit = handle->id(), .parameters = {}});
  }
  optimizer_.Step(units);
}

void Fsdp1Policy::ZeroGrad(const HookPoint& event) {
  context_.builder.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  state_.grads_zeroed = true;
  if (!context_.strategy.fsdp1.use_orig_params) ResetFlatParamGradInfoIfNeeded(context_, state_);
}

Status Fsdp1Policy::UserCall(const HookPoint& event) {
  const bool summons = event.call->method == "summon_full_params";
  if (summons && event.call->module.empty()) LazyInit(context_, state_);
  context_.builder.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  if (event.call->method == "no_sync") {  // enters (true) or leaves the context manager
    state_.sync_gradients = !event.call->value.value_or(true);
  } else if (event.call->method == "set_requires_gradient_sync") {
    state_.sync_gradients = event.call->value.value_or(true);
  } else {
    SHARDPLAN_ASSERT(summons, "CheckStrategy lets the calls of Fsdp1PolicyKnobs through");
    return SummonFullParams(context_, state_, event);
  }
  return {};
}

std::unique_ptr<PolicyState> Fsdp1Policy::State() const {
  Value value{state_, optimizer_.state()};
  // A gradient that nothing zeroes grows with every step: what it is made of decides nothing. A gradient that
  // is zeroed but still there has to be the same in every step: the verifier asks it.
  if (!state_.grads_zeroed) {
    for (std::optional<FlatParamHandle>& handle : value.fsdp.handles) {
      if (handle) handle->flat_param.contributions.clear();
    }
  }
  return std::make_unique<PolicyStateOf<Value>>(std::move(value));
}

Status Fsdp1Policy::Procedures() {
  EmitProcedures(context_);
  return {};
}

std::vector<PyTorchFault> Fsdp1Policy::Faults() const { return KnownFaults(context_); }

}  // namespace fsdp1
}  // namespace shardplan
