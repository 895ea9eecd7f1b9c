// SPDX-License-Identifier: Apache-2.0
#include "training/off_plan/on_demand.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/program.h"
#include "training/failure.h"

namespace shardplan::executor {
namespace {

// Buffers that the unit's procedures keep gradients in from one call to the next.
std::vector<BufferId> KeptBy(const Plan& plan, UnitId unit) {
  std::vector<BufferId> kept;
  const Procedure* keep = FindProcedure(plan, ProcedureKind::kAccumulate, unit);
  if (keep == nullptr) return kept;
  for (const Instruction& i : keep->instructions) {
    const bool allocates = i.kind == InstructionKind::kAllocate &&
                           plan.buffers[i.dst].role == BufferRole::kGradUnshardedAccumulated;
    if (allocates) kept.push_back(i.dst);
    if (i.kind == InstructionKind::kFree && i.parts.empty()) std::erase(kept, i.src);
  }
  return kept;
}

}  // namespace

OnDemand::OnDemand(const Plan& plan, std::int64_t rank, TorchDevice& device, std::vector<UnitState>& units,
                   const BufferParameters& buffer_parameters, GradientPresence presence, UserLock* lock,
                   std::string_view gives_up)
    : plan_(plan),
      rank_(rank),
      device_(device),
      units_(units),
      buffer_parameters_(buffer_parameters),
      presence_(std::move(presence)),
      lock_(lock),
      gives_up_(gives_up),
      whole_(plan.units.size(), -1),
      gathered_(plan.units.size(), Gathered::kNo),
      offloads_(plan.units.size()),
      keeps_(plan.units.size()),
      reduces_unused_(plan.units.size()),
      reduced_(plan.units.size()) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    const bool shard_on_host =
        buffer.role == BufferRole::kParamSharded && buffer.memory != MemoryKind::kDevice;
    if (shard_on_host) offloads_[buffer.unit] = true;
    if (buffer.role == BufferRole::kParamUnsharded && whole_[buffer.unit] < 0) {
      whole_[buffer.unit] = static_cast<BufferId>(b);
    }
  }
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    kept_.push_back(KeptBy(plan, static_cast<UnitId>(u)));
    reduces_unused_[u] = FlagSetOn(plan.strategy, plan.units[u], "set_reduce_scatter_unused_params");
  }
}

void OnDemand::Start(Replayer& replayer, Model& model, ProfilerRanges& ranges) {
  replayer_ = &replayer;
  model_ = &model;
  ranges_ = &ranges;
}

void OnDemand::Call(ProcedureKind kind, UnitId unit) {
  const ReleaseLock unlocked(lock_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  {
    std::optional<ProfilerRanges::Watch> watch;
    if (ProfilerRanges::On()) watch.emplace(*ranges_, *replayer_, kind, unit);
    if (const Status status = replayer_->Call(kind, unit); !status) {
      ThrowFailure(status.error(), replayer_->thrown());
    }
  }
  // Work issued on the compute stream is done before the model goes on there; the cpu device, whose
  // collectives run in the background, has to be told.
  OrThrow(device_.RunOn(0, [] {}));
}

void OnDemand::Unshard(UnitId unit, bool full_precision) {
  UnitState& state = units_[unit];
  if (state.unsharded || plan_.units[unit].parameters.empty()) return;
  state.unplanned = true;
  // A plan may keep it from step to step (fsdp1: a frozen unit that is not resharded after the forward), or
  // has gathered it ahead of its use.
  if (whole_[unit] >= 0 && replayer_->IsAlive(whole_[unit])) {
    gathered_[unit] = Gathered::kBoundOnly;
    const ReleaseLock unlocked(lock_);
    if (Result<bool> there = device_.Synchronize(); !there) Throw(there.error());
    return OrThrow(model_->BindUnsharded(unit, whole_[unit]));
  }
  const bool full = full_precision && replayer_->Has(ProcedureKind::kUnshardFullPrecision, unit);
  gathered_[unit] = full ? Gathered::kFullPrecision : Gathered::kWhole;
  Call(full ? ProcedureKind::kUnshardFullPrecision : ProcedureKind::kUnshard, unit);
  copies_shards_ = copies_shards_ || offloads_[unit];
}

void OnDemand::AwaitShards() {
  if (!std::exchange(copies_shards_, false)) return;
  const ReleaseLock unlocked(lock_);
  if (Result<bool> there = device_.Synchronize(); !there) Throw(there.error());
}

void OnDemand::Reshard(UnitId unit) {
  if (!units_[unit].unplanned) return;
  units_[unit].unplanned = false;
  switch (std::exchange(gathered_[unit], Gathered::kNo)) {
    case Gathered::kNo:
      return;
    case Gathered::kBoundOnly: {
      const ReleaseLock unlocked(lock_);
      return OrThrow(model_->BindSharded(unit, -1));
    }
    case Gathered::kWhole:
      return Call(ProcedureKind::kReshard, unit);
    case Gathered::kFullPrecision:
      return Call(ProcedureKind::kReshardFullPrecision, unit);
  }
}

void OnDemand::ReshardAll() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) Reshard(static_cast<UnitId>(unit));
}

// Gradients that a step keeps in another buffer than the procedures would be lost.
void OnDemand::CheckKept() const {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    const auto id = static_cast<BufferId>(b);
    if (buffer.role != BufferRole::kGradUnshardedAccumulated || !replayer_->IsAlive(id)) continue;
    const std::vector<BufferId>& kept = kept_[buffer.unit];
    if (std::ranges::find(kept, id) != kept.end()) continue;
    throw TrainingError(
        ErrorCode::kNegative,
        fmt::format("the model deviates from the plan where gradients of {} are kept in {}, which "
                    "nothing reduces on demand; {} gives the step up",
                    plan_.units[buffer.unit].fqn, buffer.name, gives_up_));
  }
}

void OnDemand::TakeOver() {
  CheckKept();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (!units_[unit].unsharded || units_[unit].unplanned) continue;
    units_[unit].unplanned = true;
    const bool full = whole_[unit] >= 0 && !replayer_->IsAlive(whole_[unit]) &&
                      replayer_->Has(ProcedureKind::kReshardFullPrecision, static_cast<UnitId>(unit));
    gathered_[unit] = full ? Gathered::kFullPrecision : Gathered::kWhole;
  }
}

bool OnDemand::HasFreshGradient(UnitId unit, std::int32_t parameter) const {
  const UnitState& state = units_[unit];
  return state.flat ? state.flat->gradient().gradient(parameter).defined()
                    : state.parameters[parameter]->unsharded_grad().defined();
}

bool OnDemand::HasKept(UnitId unit) const {
  return std::ranges::any_of(kept_[unit], [&](BufferId kept) { return replayer_->IsAlive(kept); });
}

// Gradients that a step of the plan keeps have a buffer that is alive, each its own or all one.
bool OnDemand::IsKept(UnitId unit, std::int32_t parameter) const {
  if (!keeps_[unit].empty() && keeps_[unit][parameter]) return true;
  if (!keeps_[unit].empty() && HasKept(unit)) return false;
  return std::ranges::any_of(kept_[unit], [&](BufferId kept) {
    const std::vector<std::int32_t>& of = buffer_parameters_[kept];
    return replayer_->IsAlive(kept) && std::ranges::find(of, parameter) != of.end() &&
           plan_.units[unit].parameters[parameter].requires_grad;
  });
}

std::vector<std::int32_t> OnDemand::Fresh(UnitId unit) const {
  std::vector<std::int32_t> fresh;
  for (std::size_t p = 0; p < plan_.units[unit].parameters.size(); ++p) {
    const auto parameter = static_cast<std::int32_t>(p);
    if (HasFreshGradient(unit, parameter)) fresh.push_back(parameter);
  }
  return fresh;
}

// By parameter: is its gradient kept, or one of `fresh`?
std::vector<bool> OnDemand::KeptOr(const std::vector<std::int32_t>& fresh, UnitId unit) const {
  std::vector<bool> has(plan_.units[unit].parameters.size());
  for (std::size_t p = 0; p < has.size(); ++p) has[p] = IsKept(unit, static_cast<std::int32_t>(p));
  for (const std::int32_t parameter : fresh) has[parameter] = true;
  return has;
}

bool OnDemand::Alike(std::int64_t number) const {
  const ReleaseLock unlocked(lock_);
  return presence_.Alike(number);
}

bool OnDemand::HasGradients(UnitId unit) const { return HasKept(unit) || !Fresh(unit).empty(); }

bool OnDemand::ReducesZeros(UnitId unit) const {
  return reduces_unused_[unit] && units_[unit].was_unsharded && !reduced_[unit];
}

void OnDemand::EndBackward() { reduced_.assign(units_.size(), false); }

// A procedure finds all of them there.
void OnDemand::FillKept(UnitId unit) {
  const InsideUserCode guards(lock_);
  for (const BufferId kept : kept_[unit]) {
    if (replayer_->IsAlive(kept)) continue;
    OrThrow(replayer_->Provide(kept));
    for (std::size_t part = 0; part < plan_.buffers[kept].parts_bytes.size(); ++part) {
      device_.Part(kept, static_cast<std::int32_t>(part)).zero_();
    }
  }
}

std::vector<std::int32_t> OnDemand::Reduce(UnitId unit) {
  if (!replayer_->Has(ProcedureKind::kReduce, unit)) return {};  // nothing of it trains
  const std::vector<std::int32_t> fresh = Fresh(unit);
  const bool kept = HasKept(unit);
  std::vector<bool> mine = KeptOr(fresh, unit);
  if (ReducesZeros(unit)) {
    for (std::size_t p = 0; p < mine.size(); ++p) {
      mine[p] = mine[p] || plan_.units[unit].parameters[p].requires_grad;
    }
  }
  reduced_[unit] = true;
  std::vector<bool> any;
  {
    const ReleaseLock unlocked(lock_);
    any = presence_.AnyRank(unit, mine);
  }
  if (std::ranges::none_of(any, [](bool has) { return has; })) return {};
  if (kept) FillKept(unit);
  const ProcedureKind kind = !kept           ? ProcedureKind::kReduce
                             : fresh.empty() ? ProcedureKind::kReduceKept
                                             : ProcedureKind::kReduceAccumulated;
  CallWithGradients(kind, unit, std::move(any));
  keeps_[unit].clear();
  return fresh;
}

std::vector<std::int32_t> OnDemand::Keep(UnitId unit) {
  const std::vector<std::int32_t> fresh = Fresh(unit);
  // Without a procedure they stay where autograd adds to them.
  if (fresh.empty() || !replayer_->Has(ProcedureKind::kAccumulate, unit)) return fresh;
  const bool kept = HasKept(unit);
  std::vector<bool> keeps = KeptOr(fresh, unit);
  if (kept) FillKept(unit);
  CallWithGradients(kept ? ProcedureKind::kAccumulateAgain : ProcedureKind::kAccumulate, unit, {});
  keeps_[unit] = std::move(keeps);
  return fresh;
}

void OnDemand::ReducePartial() {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (!IsPartlyReduced(buffer.role) || !replayer_->IsAlive(static_cast<BufferId>(b))) continue;
    const Procedure* procedure = FindProcedure(plan_, ProcedureKind::kReducePartial, buffer.unit);
    const bool is_its =
        procedure != nullptr && std::ranges::any_of(procedure->instructions, [&](const Instruction& i) {
          return i.src == static_cast<BufferId>(b);
        });
    if (!is_its) {
      throw TrainingError(
          ErrorCode::kNegative,
          fmt::format("the model deviates from the plan between micro-batches whose gradients are reduced "
                      "over a part of the ranks alone, and the plan does not say how to reduce {} on "
                      "demand",
                      buffer.name));
    }
    std::vector<bool> any(plan_.units[buffer.unit].parameters.size());
    for (const std::int32_t parameter : buffer_parameters_[b]) any[parameter] = true;
    CallWithGradients(ProcedureKind::kReducePartial, buffer.unit, std::move(any));
  }
}

std::vector<UnitId> OnDemand::UnitsWithGradients() const {
  std::vector<bool> mine(units_.size());
  for (std::size_t u = 0; u < units_.size(); ++u) {
    mine[u] = HasGradients(static_cast<UnitId>(u)) || ReducesZeros(static_cast<UnitId>(u));
  }
  std::vector<bool> any;
  {
    const ReleaseLock unlocked(lock_);
    any = presence_.AnyRankByUnit(mine);
  }
  std::vector<UnitId> units;
  for (std::size_t u = 0; u < any.size(); ++u) {
    if (any[u]) units.push_back(static_cast<UnitId>(u));
  }
  return units;
}

void OnDemand::DropGradients() {
  const HoldLock held(lock_);
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (const auto& parameter : units_[u].parameters) parameter->unsharded_grad() = at::Tensor();
    if (units_[u].flat) units_[u].flat->gradient().Clear();
    keeps_[u].clear();
  }
}

void OnDemand::CallWithGradients(ProcedureKind kind, UnitId unit, std::vector<bool> any) {
  under_way_ = {unit, std::move(any), {}};
  try {
    Call(kind, unit);
    const InsideUserCode guards(lock_);
    OrThrow(PublishReady());
  } catch (...) {
    under_way_ = {};
    throw;
  }
  under_way_ = {};
}

Status OnDemand::SupplyGradients(UnitId unit, BufferId buffer) {
  std::vector<at::Tensor> parts;
  for (const std::int32_t p : buffer_parameters_[buffer]) {
    if (units_[unit].flat) {  // undefined: zeros
      parts.push_back(units_[unit].flat->gradient().gradient(p));
      continue;
    }
    at::Tensor grad = units_[unit].parameters[p]->LocalGradient();
    if (!grad.defined()) {
      const auto options =
          at::TensorOptions(ToScalarType(plan_.buffers[buffer].dtype)).device(device_.torch_device());
      grad = at::zeros(plan_.units[unit].parameters[p].shape, options);
    }
    parts.push_back(std::move(grad));
  }
  return device_.SetParts(buffer, std::move(parts));
}

// A gradient that the user waits for in the backward is handed over now; the plan may go on with it.
Status OnDemand::GradientsReady(UnitId unit, BufferId buffer) {
  std::vector<BufferId>& ready = under_way_.ready;
  if (std::ranges::find(ready, buffer) == ready.end()) ready.push_back(buffer);
  const auto is_waited_for = [&](std::int32_t p) { return units_[unit].parameters[p]->HasGradHooks(); };
  if (units_[unit].flat || std::ranges::none_of(buffer_parameters_[buffer], is_waited_for)) return {};
  if (Result<bool> there = device_.Synchronize(); !there) return std::unexpected(std::move(there.error()));
  const InsideUserCode guards(lock_);
  if (Status status = Publish(buffer); !status) return status;
  std::erase(ready, buffer);
  return {};
}

Status OnDemand::Publish(BufferId buffer) {
  UnitState& state = units_[under_way_.unit];
  for (const std::int32_t p : buffer_parameters_[buffer]) {
    if (!under_way_.any[p]) continue;
    Result<at::Tensor> local = device_.ShardedView(buffer, p, rank_);
    if (!local) return std::unexpected(std::move(local.error()));
    if (Status status = state.parameters[p]->PublishGrad(*local); !status) return status;
    if (state.parameters[p]->HasGradHooks()) state.parameters[p]->RunGradHooks();
  }
  return {};
}

// A reduction may end with another buffer than it reduced into (kept in low precision, offloaded): the last
// one that is alive counts. A unit that has trained before in this step adds to that gradient.
Status OnDemand::PublishFlat() {
  const auto alive = [&](BufferId buffer) { return replayer_->IsAlive(buffer); };
  const auto last = std::find_if(under_way_.ready.rbegin(), under_way_.ready.rend(), alive);
  if (last == under_way_.ready.rend()) return {};
  Result<at::Tensor> local = device_.ShardedView(*last, 0, rank_);
  if (!local) return std::unexpected(std::move(local.error()));
  FlatUnit& flat = *units_[under_way_.unit].flat;
  flat.ForgetGradient();
  return flat.PublishGradient(*local);
}

Status OnDemand::PublishReady() {
  const std::vector<BufferId> ready = under_way_.ready;
  if (units_[under_way_.unit].flat) {
    if (Status status = PublishFlat(); !status) return status;
  } else {
    for (const BufferId buffer : ready) {
      if (Status status = Publish(buffer); !status) return status;
    }
  }
  under_way_.ready.clear();
  for (const BufferId buffer : ready) {
    if (!replayer_->IsAlive(buffer) || plan_.buffers[buffer].persistent) continue;
    if (Status status = replayer_->Release(buffer); !status) return status;
  }
  return {};
}

Status OnDemand::StepInBackward(UnitId unit, std::int32_t parameter) {
  if (unit < 0 || parameter < 0 || !units_[unit].flat) return {};
  Status status;
  const Status ran = device_.RunOn(0, [&] {  // what is reduced is there
    const InsideUserCode guards(lock_);
    if (!under_way_.ready.empty()) status = PublishFlat();
    under_way_.ready.clear();
    if (status) status = units_[unit].flat->StepInBackward(parameter);
  });
  return ran ? status : ran;
}

}  // namespace shardplan::executor
