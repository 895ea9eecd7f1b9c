// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <numeric>
#include <ranges>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policy/fsdp2/exchanges_in_backward.h"
#include "policy/fsdp2/fully_shard.h"
#include "policy/fsdp2/param_groups.h"
#include "policy/optimizer_memory.h"
#include "shardplan/planner/policy.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "units/model_index.h"
#include "units/partition.h"

namespace shardplan {

struct UnitOperations::State::Value {
  std::vector<fsdp2::FsdpParamGroup::Snapshot> groups;
  fsdp2::FsdpCommContext::State comm_ctx;
  OptimizerMemory::State optimizer;
  bool gathers_wait = true;
  bool operator==(const Value&) const = default;
};

bool UnitOperations::State::operator==(const State& other) const { return *value_ == *other.value_; }

class UnitOperations::Impl {
 public:
  Impl(const PolicyInput& input, ProgramBuilder& program)
      : input_(input),
        program_(program),
        optimizer_(input.trace, input.strategy, input.partition, program),
        exchanges_(input_, optimizer_),
        rules_(RulesOf(input.strategy)),
        comm_ctx_(program) {}

  Status SetUp() {
    if (Status s = optimizer_.Check(); !s) return s;
    const std::vector<UnitChoice>& units = input_.partition.units;
    scopes_.reserve(units.size());
    own_groups_.reserve(units.size());
    for (std::size_t u = 0; u < units.size(); ++u) {
      scopes_.emplace_back(static_cast<UnitId>(u), input_.partition, input_.strategy, program_);
      groups_.push_back(units[u].unit.parameters.empty() ? nullptr : AddGroup(scopes_.back()));
    }
    for (std::size_t c = 0; c < input_.strategy.setup.size(); ++c) {
      Status set = Set(input_.strategy.setup[c]);
      if (set) continue;
      set.error().pointer = fmt::format("/setup/{}", c);
      return set;
    }
    fsdp2::SetUpGroups(input_, groups_, program_);
    comm_ctx_.LazyInit(/*earlier=*/0);
    return {};
  }

  Status Begin(const HookPoint& point) {
    exchanges_.Pass(point);
    const auto trigger = [&](TriggerKind kind, std::string_view reason) {
      program_.BeginTrigger(kind, point.unit, point.microbatch);
      at_ = point.unit;
      reason_ = reason;
      program_.SetReason(reason);
    };
    switch (point.kind) {
      case HookPointKind::kForwardBegin:
        in_forward_ = true;
        open_forwards_ = 0;
        break;
      case HookPointKind::kForwardEnd:
        FreeKeptGather();
        in_forward_ = false;
        break;
      case HookPointKind::kPreForward:
        ++open_forwards_;
        trigger(TriggerKind::kPreForward, "pre_forward");
        break;
      case HookPointKind::kPostForward:
        trigger(TriggerKind::kPostForward, "post_forward");
        if (--open_forwards_ == 0) FreeKeptGather();
        break;
      case HookPointKind::kRecomputePreForward:
        trigger(TriggerKind::kPreForward, "recompute");
        break;
      case HookPointKind::kRecomputePostForward:
        trigger(TriggerKind::kPostForward, "recompute");
        break;
      case HookPointKind::kBackwardBegin:
        backward_unit_ = -1;
        break;
      case HookPointKind::kPreBackward:
        backward_unit_ = point.unit;
        trigger(TriggerKind::kPreBackward, "pre_backward");
        break;
      case HookPointKind::kInputsGradDone:
        if (groups_[point.unit] != nullptr) trigger(TriggerKind::kPostBackward, "autograd");
        break;
      case HookPointKind::kBackwardEnd:
        backward_unit_ = -1;
        trigger(TriggerKind::kBackwardEnd, "final");
        break;
      case HookPointKind::kOptimizerStep:
        trigger(TriggerKind::kOptimizerStep, "optimizer");
        for (std::size_t u = 0; u < groups_.size(); ++u) Await(static_cast<UnitId>(u));
        fsdp2::StepOptimizer(groups_, optimizer_);
        gathers_wait_ = true;
        break;
      case HookPointKind::kZeroGrad:
        fsdp2::ZeroGrad(point, groups_, program_);
        at_ = -1;
        reason_ = "user";
        break;
      case HookPointKind::kModuleCall:
        trigger(TriggerKind::kUserCall, "user");
        return Set(*point.call);
      case HookPointKind::kSegment:
        fsdp2::Compute(input_, point, backward_unit_, groups_, program_);
        break;
      case HookPointKind::kParameterGradsDone:
      case HookPointKind::kUnitBackwardDone:
        break;
    }
    return {};
  }

  // Null: the unit has no parameters, or there is none.
  fsdp2::FsdpParamGroup* Group(UnitId unit) {
    if (unit >= 0 && unit < std::ssize(groups_)) return groups_[unit];
    program_.Refuse(fmt::format("an operation is on unit {}, of {} that there are", unit, groups_.size()));
    return nullptr;
  }

  void Gather(UnitId unit) {
    fsdp2::FsdpParamGroup* group = Group(unit);
    if (group == nullptr || group->is_gathering() || group->is_unsharded()) return;
    AwaitCompute();
    const std::string_view prefetch = in_forward_ ? "prefetch_forward" : "prefetch_backward";
    const Status gathered = group->PrefetchUnshard(group->scope(), comm_ctx_, Pass(),
                                                   unit == at_ || at_ < 0 ? reason_ : prefetch);
    if (!gathered) program_.Refuse(gathered.error().message);
  }

  // An optimizer's step awaits it, too: a later copy-out would have parameters of before the step.
  void Await(UnitId unit) {
    fsdp2::FsdpParamGroup* group = Group(unit);
    if (group == nullptr || !group->is_gathering()) return;
    Work(unit, reason_);
    group->SetTrainingState(Pass());
    group->WaitForUnshard();
    Leave();
  }

  void Free(UnitId unit) {
    fsdp2::FsdpParamGroup* group = Group(unit);
    if (group == nullptr) return;
    Await(unit);
    if (!group->is_unsharded()) return;
    Work(unit, reason_);
    group->ToSharded();
    Leave();
  }

  void Reduce(UnitId unit) {
    if (fsdp2::FsdpParamGroup* group = Group(unit); group != nullptr) Reduce(*group, reason_);
  }

  void EndBackward() {
    for (fsdp2::FsdpParamGroup* group : groups_ | std::views::reverse) {
      if (group == nullptr) continue;
      const bool again = group->settings().reduce_grads && group->unsharded_grads().HasGrads();
      if (!reduced_.contains(group) || again) Reduce(*group, "final");
    }
    reduced_.clear();
    Work(-1, "finalize");
    if (rules_.one_wait_a_stream) comm_ctx_.WaitForLastReductions();
    for (fsdp2::FsdpParamGroup* group : groups_) {
      if (group == nullptr) continue;
      Work(group->scope().id(), "finalize");
      gathers_wait_ = gathers_wait_ || group->is_gathering();  // its memory is freed when compute has waited
      group->FinalizeBackward();
      group->SetIdle();
    }
    Work(-1, "finalize");
    comm_ctx_.FinishReduceScatters();
    Leave();
  }

  Status Procedures() {
    return fsdp2::EmitProcedures(groups_, input_.strategy.optimizer.in_backward ? &optimizer_ : nullptr,
                                 faults_);
  }

  UnitOperations::State state() const {
    auto value = std::make_shared<UnitOperations::State::Value>(
        UnitOperations::State::Value{.groups = {},
                                     .comm_ctx = comm_ctx_.state(),
                                     .optimizer = optimizer_.state(),
                                     .gathers_wait = gathers_wait_});
    for (fsdp2::FsdpParamGroup* group : groups_) {
      if (group != nullptr) value->groups.push_back(group->snapshot());
    }
    UnitOperations::State state;
    state.value_ = std::move(value);
    return state;
  }

 private:
  // The decisions of FSDP2's hooks are the policy's own.
  fsdp2::FsdpParamGroup* AddGroup(const fsdp2::UnitScope& scope) {
    fsdp2::ParamGroupSettings settings = fsdp2::SettingsOf(scope.choice(), input_.strategy.fsdp2);
    settings.reshard_after_backward = settings.part_after_backward = false;
    settings.post_forward_ranks = 0;
    OptimizerMemory* in_backward = input_.strategy.optimizer.in_backward ? &optimizer_ : nullptr;
    own_groups_.push_back(
        std::make_unique<fsdp2::FsdpParamGroup>(scope, settings, comm_ctx_, in_backward, faults_));
    own_groups_.back()->LazyInit();
    return own_groups_.back().get();
  }

  // set_requires_gradient_sync, set_requires_all_reduce: CheckStrategy lets no other call through.
  Status Set(const ModuleCall& call) {
    const Result<UnitId> own = UnitOfModule(input_.index, input_.partition, call.module);
    if (!own) return std::unexpected(own.error());
    std::vector<UnitId> units;
    if (call.recurse) {
      units = UnitsUnder(input_.trace, input_.index, input_.partition, call.module);
    } else if (*own >= 0) {
      units = GroupsOf(input_.partition, *own);
    }
    const bool value = call.value.value_or(true);
    for (const UnitId unit : units) {
      if (groups_[unit] == nullptr) continue;
      fsdp2::ParamGroupSettings& settings = groups_[unit]->settings();
      if (call.method == "set_requires_gradient_sync") settings.reduce_grads = value;
      settings.all_reduce_grads = value;
    }
    return {};
  }

  // In a forward an all-gather's output is kept until the next unit has copied out.
  fsdp2::TrainingState Pass() const {
    return in_forward_ ? fsdp2::TrainingState::kForward : fsdp2::TrainingState::kPreBackward;
  }

  void FreeKeptGather() {
    if (const auto kept = comm_ctx_.TakeAllGather()) comm_ctx_.Free(*kept);
  }

  // The first gather after the optimizer's step waits for it, and so do those behind it on the same streams.
  void AwaitCompute() {
    if (!std::exchange(gathers_wait_, false)) return;
    const EventId done = program_.Event("before_gathers");
    program_.Record(done, kCompute);
    comm_ctx_.WaitAllGatherStreamsOnEvent(done);
  }

  void Reduce(fsdp2::FsdpParamGroup& group, std::string_view reason) {
    if (!group.has_unreduced_grads()) return;
    reduced_.insert(&group);
    group.SetTrainingState(fsdp2::TrainingState::kPreBackward);
    if (Status reduced = group.PostBackward(reason); !reduced) program_.Refuse(reduced.error().message);
    exchanges_.Reduced(group);
    Leave();
  }

  void Work(UnitId unit, std::string_view reason) {
    program_.SetUnit(unit);
    program_.SetReason(reason);
  }
  void Leave() { Work(at_, reason_); }

  const PolicyInput input_;
  ProgramBuilder& program_;
  FaultList faults_;  // of PyTorch's hooks: none of them is used
  OptimizerMemory optimizer_;
  fsdp2::ExchangesInBackward exchanges_;
  const PyTorchRules rules_;
  fsdp2::FsdpCommContext comm_ctx_;
  std::vector<fsdp2::UnitScope> scopes_;
  std::vector<std::unique_ptr<fsdp2::FsdpParamGroup>> own_groups_;
  fsdp2::ParamGroups groups_;
  // The position of the host. Equal at the beginning of all steps.
  bool in_forward_ = false;
  int open_forwards_ = 0;
  UnitId backward_unit_ = -1;
  UnitId at_ = -1;
  std::string_view reason_;
  std::set<const fsdp2::FsdpParamGroup*> reduced_;  // in this backward
  // The next gather waits for compute: parameters have changed, or memory of gathers was freed.
  bool gathers_wait_ = true;
};

UnitOperations::UnitOperations(const PolicyInput& input, ProgramBuilder& builder)
    : impl_(std::make_unique<Impl>(input, builder)) {}
UnitOperations::~UnitOperations() = default;

Status UnitOperations::SetUp() { return impl_->SetUp(); }
Status UnitOperations::Begin(const HookPoint& point) { return impl_->Begin(point); }

std::int64_t UnitOperations::Numel(UnitId unit) const {
  const fsdp2::FsdpParamGroup* group = impl_->Group(unit);
  if (group == nullptr) return 0;
  const std::vector<UnitParameter>& parameters = group->scope().unit().parameters;
  return std::accumulate(parameters.begin(), parameters.end(), std::int64_t{0},
                         [](std::int64_t sum, const UnitParameter& p) { return sum + shardplan::Numel(p); });
}

bool UnitOperations::IsGathering(UnitId unit) const {
  const fsdp2::FsdpParamGroup* group = impl_->Group(unit);
  return group != nullptr && group->is_gathering();
}

bool UnitOperations::IsUnsharded(UnitId unit) const {
  const fsdp2::FsdpParamGroup* group = impl_->Group(unit);
  return group != nullptr && group->is_unsharded();
}

bool UnitOperations::HasGradients(UnitId unit) const {
  const fsdp2::FsdpParamGroup* group = impl_->Group(unit);
  return group != nullptr && group->has_unreduced_grads();
}

void UnitOperations::Gather(UnitId unit) { impl_->Gather(unit); }
void UnitOperations::Await(UnitId unit) { impl_->Await(unit); }
void UnitOperations::Free(UnitId unit) { impl_->Free(unit); }
void UnitOperations::Reduce(UnitId unit) { impl_->Reduce(unit); }
void UnitOperations::EndBackward() { impl_->EndBackward(); }
Status UnitOperations::Procedures() { return impl_->Procedures(); }
UnitOperations::State UnitOperations::state() const { return impl_->state(); }

}  // namespace shardplan
