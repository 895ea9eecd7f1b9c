// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "policy/fsdp2/fully_shard.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace fsdp2 {

Fsdp2Policy::Fsdp2Policy(const PolicyInput& input, ProgramBuilder& program)
    : input_(input),
      program_(program),
      optimizer_(input.trace, input.strategy, input.partition, program),
      exchanges_(input_, optimizer_),
      model_(input.trace, input.index, input.partition),
      module_calls_(model_, program) {}

Status Fsdp2Policy::SetUp() {
  FullyShard(input_, program_, optimizer_, faults_, model_);
  for (std::size_t u = 0; u < model_.size(); ++u) groups_.push_back(model_[static_cast<UnitId>(u)].group());
  if (Status s = optimizer_.Check(); !s) return s;
  if (Status s = ShareCommContexts(input_, model_); !s) return s;
  if (Status s = SetPrefetchLists(input_, model_); !s) return s;
  if (Status s = CallSetters(); !s) return s;
  const auto zeroes = [](const ProgramCall& call) { return std::holds_alternative<ZeroGradCall>(call); };
  const std::vector<StepProgram>& program = input_.strategy.program;
  if (!program.empty() && std::ranges::none_of(program.back(), zeroes)) {
    faults_.Add(PyTorchFault::kFsdp2GradientsGrow);
  }
  // If the model's root is the first to be called, its first forward is like every other.
  const UnitId first = FirstCalled();
  return first >= 0 && input_.partition.units[first].is_root ? model_[first].LazyInit(model_) : Status{};
}

Status Fsdp2Policy::CallSetters() {
  const std::vector<ModuleCall>& calls = input_.strategy.setup;
  for (std::size_t c = 0; c < calls.size(); ++c) {
    if (Status s = module_calls_.SetUp(calls[c]); !s) {
      return MakeInputError(fmt::format("/setup/{}", c), s.error().message, s.error().found,
                            s.error().expected);
    }
  }
  SetUpGroups(input_, groups_, program_);
  return {};
}

// The unit of the program's first forward or user call.
UnitId Fsdp2Policy::FirstCalled() const {
  for (const RecordedStep& step : input_.steps) {
    for (const HookPoint& event : step.events) {
      if (event.kind == HookPointKind::kModuleCall) return -1;
      if (event.kind == HookPointKind::kPreForward) return event.unit;
    }
  }
  return -1;
}

Status Fsdp2Policy::On(const HookPoint& event) {
  exchanges_.Pass(event);
  switch (event.kind) {
    case HookPointKind::kSegment:
      Compute(input_, event, backward_unit_, groups_, program_);
      break;
    case HookPointKind::kPreForward:
    case HookPointKind::kRecomputePreForward:
      return model_[event.unit].PreForward(event, model_);
    case HookPointKind::kPostForward:
    case HookPointKind::kRecomputePostForward:
      model_[event.unit].PostForward(event);
      break;
    case HookPointKind::kBackwardBegin:
      backward_unit_ = -1;
      break;
    case HookPointKind::kPreBackward:
      backward_unit_ = event.unit;
      return model_[event.unit].PreBackward(event, final_callbacks_);
    case HookPointKind::kInputsGradDone:
      return PostBackward(event);
    case HookPointKind::kBackwardEnd:
      return BackwardEnd(event);
    case HookPointKind::kOptimizerStep:
      OptimizerStep(event);
      break;
    case HookPointKind::kZeroGrad:
      ZeroGrad(event, groups_, program_);
      break;
    case HookPointKind::kModuleCall:
      // The engine has dropped what was queued in the backward that raised.
      if (IsReset(*event.call)) final_callbacks_.clear();
      return module_calls_.Call(event);
    default:  // points that only other policies act on
      break;
  }
  return {};
}

Status Fsdp2Policy::PostBackward(const HookPoint& event) {
  const Status done = model_[event.unit].PostBackward(event);
  if (done && groups_[event.unit] != nullptr) exchanges_.Reduced(*groups_[event.unit]);
  return done;
}

// The engine runs the callbacks that roots have queued, in that order.
Status Fsdp2Policy::BackwardEnd(const HookPoint& event) {
  program_.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  backward_unit_ = -1;
  for (FsdpState* state : std::exchange(final_callbacks_, {})) {
    if (Status s = state->RootPostBackwardFinalCallback(); !s) return s;
  }
  return {};
}

void Fsdp2Policy::OptimizerStep(const HookPoint& event) {
  program_.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  for (const FsdpParamGroup* group : groups_) {
    if (group != nullptr && group->holds_copies_of_shards()) faults_.Add(PyTorchFault::kFsdp2Outdated);
  }
  StepOptimizer(groups_, optimizer_);
  if (!input_.strategy.fsdp2.post_optim_event) return;
  // The user's own event: unrelated work after the optimizer does not hold up the first all-gather.
  program_.SetReason("post_optim_event");
  const EventId optimized = program_.Event("post_optim");
  program_.Record(optimized, kCompute);
  for (std::size_t u = 0; u < model_.size(); ++u) {
    FsdpState& state = model_[static_cast<UnitId>(u)];
    if (state.is_root()) state.state_ctx().post_optim_event = optimized;
  }
}

Status Fsdp2Policy::Procedures() {
  return EmitProcedures(groups_, input_.strategy.optimizer.in_backward ? &optimizer_ : nullptr, faults_);
}

std::unique_ptr<PolicyState> Fsdp2Policy::State() const {
  Fsdp2PolicyState state{.units = {},
                         .final_callbacks = final_callbacks_,
                         .backward_unit = backward_unit_,
                         .optimizer = optimizer_.state()};
  for (std::size_t u = 0; u < model_.size(); ++u) {
    state.units.push_back(model_[static_cast<UnitId>(u)].snapshot());
  }
  return std::make_unique<PolicyStateOf<Fsdp2PolicyState>>(std::move(state));
}

}  // namespace fsdp2

std::unique_ptr<Policy> MakeFsdp2Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<fsdp2::Fsdp2Policy>(input, builder);
}

}  // namespace shardplan
