// SPDX-License-Identifier: Apache-2.0
#include "training/runtime/runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "training/failure.h"

namespace shardplan::executor {
namespace {

BufferParameters ParametersOfBuffers(const Plan& plan) {
  BufferParameters parameters;
  for (const Buffer& buffer : plan.buffers) {
    parameters.push_back(buffer.unit < 0 ? std::vector<std::int32_t>() : ParametersOf(plan, buffer));
  }
  return parameters;
}

}  // namespace

Runtime::Tables::Tables(const Plan& plan)
    : buffer_parameters(ParametersOfBuffers(plan)),
      unsharded_buffer(plan.units.size(), -1),
      order(plan),
      grads_stay_as_made(RulesOf(plan.strategy).gradients_stay_as_made) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    // A flat unit may have another one in full precision.
    if (buffer.role == BufferRole::kParamUnsharded && unsharded_buffer[buffer.unit] < 0) {
      unsharded_buffer[buffer.unit] = static_cast<BufferId>(i);
    }
  }
}

Runtime::Runtime(std::shared_ptr<const Plan> plan, std::int64_t rank, std::unique_ptr<TorchDevice> device,
                 std::unique_ptr<Collectives> collectives,
                 std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups, RuntimeOptions options)
    : plan_(std::move(plan)),
      rank_(rank),
      device_(std::move(device)),
      lock_(options.lock),
      options_(std::move(options)),
      collectives_(std::move(collectives)),
      units_(plan_->units.size()),
      shards_(plan_->units.size()),
      tables_(*plan_),
      on_demand_(*plan_, rank_, *device_, units_, tables_.buffer_parameters,
                 GradientPresence(*plan_, std::move(groups)), lock_, options_.gives_up),
      fallback_(
          *plan_, tables_.order, units_, tables_.buffer_parameters, on_demand_,
          [this](UnitId unit) { return Reduces(unit); },
          [this](const std::string& text) {
            return options_.consensus ? options_.consensus->InWords(Tell(text)) : text;
          },
          lock_),
      handover_(*plan_, rank_, *device_, units_, tables_.buffer_parameters, lock_),
      ranges_(*plan_),
      groups_(*plan_) {}

Runtime::~Runtime() = default;

void Runtime::DropObjects() {
  for (UnitState& unit : units_) {
    unit.parameters.clear();
    unit.flat.reset();
    unit.reduction_hook = {};
  }
  fallback_.Clear();
}

void Runtime::DropExecution() {
  replayer_.reset();
  collectives_.reset();
}

void Runtime::SetShards(UnitId unit, std::vector<at::Tensor> padded) {
  for (std::size_t i = 0; i < plan_->buffers.size(); ++i) {
    const Buffer& buffer = plan_->buffers[i];
    if (buffer.role != BufferRole::kParamSharded || buffer.unit != unit) continue;
    std::vector<at::Tensor> parts;
    for (const std::int32_t parameter : tables_.buffer_parameters[i]) parts.push_back(padded[parameter]);
    OrThrow(device_->SetParts(static_cast<BufferId>(i), std::move(parts)));
  }
  shards_[unit] = std::move(padded);
}

void Runtime::Start() {
  auto replayer = Replayer::Create(*plan_, rank_, *device_, *collectives_, this);
  if (!replayer) Throw(replayer.error());
  replayer_ = std::move(*replayer);
  on_demand_.Start(*replayer_, *this, ranges_);
  for (std::size_t unit = 0; unit < units_.size(); ++unit) SetGradDTypes(static_cast<UnitId>(unit), false);
}

// Do the unit's gradients of this backward wait for a later one?
bool Runtime::Waits(UnitId unit) const {
  if (user_.sync) return !(*user_.sync)[unit];
  if (fallback_.active()) return !Reduces(unit);
  const std::vector<UnitGradients>* planned = tables_.order.Gradients(tables_.order.NextHooked(Position()));
  return planned != nullptr && (*planned)[unit] == UnitGradients::kKept;
}

void Runtime::SetGradDTypes(UnitId unit, bool in_backward) {
  const Unit& of = plan_->units[unit];
  if (!tables_.grads_stay_as_made || of.layout != LayoutKind::kPerParameter) return;
  const HoldLock held(lock_);
  const bool waits = in_backward && Waits(unit);
  for (std::size_t p = 0; p < units_[unit].parameters.size(); ++p) {
    const UnitParameter& parameter = of.parameters[p];
    if (!parameter.requires_grad) continue;
    const at::Tensor& grad = units_[unit].parameters[p]->unsharded_grad();
    const at::ScalarType accumulated = ToScalarType(AccumulatedGradDType(of, parameter));
    const bool adds =
        in_backward && (grad.defined() || on_demand_.IsKept(unit, static_cast<std::int32_t>(p)));
    const bool stays = KeepsWiderGrads(of, parameter) && in_backward && (adds || !waits);
    if (stays || (grad.defined() && grad.scalar_type() != accumulated)) {
      units_[unit].parameters[p]->SetGradDType(std::nullopt);
    } else {
      units_[unit].parameters[p]->SetGradDType(accumulated);
    }
  }
}

at::Tensor Runtime::UnshardedView(UnitId unit, std::int32_t parameter) const {
  Result<at::Tensor> view = device_->ParameterView(tables_.unsharded_buffer[unit], parameter);
  if (!view) Throw(view.error());
  return *view;
}

void Runtime::AddParameter(UnitId unit, std::unique_ptr<ModelParameter> parameter) {
  units_[unit].parameters.push_back(std::move(parameter));
}

bool Runtime::BetweenSteps() const {
  if (fallback_.active()) return false;
  const TriggerKind next = replayer_->Expected().kind;
  return replayer_->AtStepBegin() || next == TriggerKind::kOptimizerStep || next == TriggerKind::kZeroGrad ||
         next == TriggerKind::kStepEnd;
}

void Runtime::Fire(const TriggerKey& trigger) {
  const ReleaseLock unlocked(lock_);
  // Below autograd, and without counting versions: what is copied into an unsharded parameter is no change
  // that a saved tensor has to know of (and dispatch is cheaper).
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  now_.firing = trigger.kind;
  const Status status = ProfilerRanges::On() ? FireWatched(trigger) : replayer_->Fire(trigger);
  if (!status) [[unlikely]] {
    ThrowFailure(status.error(), replayer_->thrown());
  }
}

Status Runtime::FireWatched(const TriggerKey& trigger) {
  const ProfilerRanges::Watch watch(ranges_, *replayer_, trigger.kind, trigger.unit,
                                    trigger.unit == now_.forward_root);
  return replayer_->Fire(trigger);
}

void Runtime::Pass(TriggerKind kind, UnitId unit, bool full_precision) {
  if (fallback_.active()) [[unlikely]] {
    return fallback_.Pass(kind, unit, full_precision);
  }
  for (std::int64_t steps = 0; PassedSilently(replayer_->Expected().kind);) {
    if (replayer_->AtStepBegin()) {
      if (++steps > std::ssize(plan_->steps) + 1) break;  // a plan without any point of the model
      AdoptChanges();
      if (const std::string change = RequiresGradChange(); !change.empty()) {
        throw TrainingError(ErrorCode::kNegative, change);
      }
      now_.full_precision_forwards.clear();
      now_.modules.clear();
      now_.backwards = 0;
      now_.unseen_backward = -1;
    }
    Fire(TriggerKey(replayer_->Expected()));
  }
  if (Deviates(kind, unit)) [[unlikely]] {
    const bool same = replayer_->Expected().kind == kind && replayer_->Expected().unit == unit;
    const bool only_missing = same && fallback_.ExtraGradient(Position()).empty();
    if (!Deviate(FoundText(kind, unit), {}, only_missing)) return FireWithZeros();
    return fallback_.Pass(kind, unit, full_precision);
  }
  Fire({kind, unit, replayer_->Expected().microbatch});
}

// Is the point another one than the plan's next?
bool Runtime::Deviates(TriggerKind kind, UnitId unit) const {
  return !fallback_.IsAsPlanned(Position(), kind, unit);
}

// A point that is the plan's next one, but without a gradient or with one more, is described by that.
std::string Runtime::FoundText(TriggerKind kind, UnitId unit) const {
  const std::string text = TriggerText(*plan_, {kind, unit, replayer_->Expected().microbatch});
  if (replayer_->Expected().kind != kind || replayer_->Expected().unit != unit) return text;
  const std::string missing = fallback_.MissingGradient(Position());
  const std::string extra = missing.empty() ? fallback_.ExtraGradient(Position()) : "";
  if (!missing.empty()) {
    return fmt::format("{}, where {} got no gradient in this backward, but the plan reduces it", text,
                       missing);
  }
  return extra.empty()
             ? text
             : fmt::format("{}, where {} got a gradient that the plan does not reduce", text, extra);
}

// A point that the plan has next, and why the model does not pass it, where that is known.
std::string Runtime::Explained(const std::string& expected, UnitId unit) {
  if (unit < 0) return expected;
  const HoldLock held(lock_);
  const std::string reason = ExplainDeviation(unit);
  return reason.empty() ? expected : fmt::format("{}: {}", expected, reason);
}

bool Runtime::Deviate(const std::string& found, const std::string& instead_of, bool only_missing) {
  const TriggerKey& next = replayer_->Expected();
  const std::string expected =
      instead_of.empty() ? Explained(TriggerText(*plan_, next), next.unit) : instead_of;
  const std::string text = fmt::format("found {}, expected {} ({})", found, expected, Where());
  if (options_.consensus) {
    const ReleaseLock unlocked(lock_);
    options_.consensus->Leave(collectives_->Issued(), text, fallback_.enabled());
  }
  if (!fallback_.enabled()) {
    throw TrainingError(ErrorCode::kNegative,
                        fmt::format("the model deviates from the plan: {}. {}; {} gives the step up", text,
                                    options_.after_deviation, options_.gives_up));
  }
  if (options_.consensus) {
    const PlanPosition now = Position();
    const Whereabouts here = {.leaves = true,
                              .may_go_on = only_missing,
                              .place = fmt::format("{} {} {}", now.step, now.trigger, instead_of),
                              .text = text};
    const ReleaseLock unlocked(lock_);
    const Result<DeviationVerdict> agreed = options_.consensus->Meet(here);
    if (!agreed) Throw(agreed.error());
    if (*agreed == DeviationVerdict::kGoOn) return GoOnWithZeros(text);
  }
  fallback_.Begin(
      found, expected, *replayer_, [this] { handover_.PublishAll(/*zeros=*/false); }, now_.modules);
  return true;
}

// Said once.
bool Runtime::GoOnWithZeros(const std::string& text) {
  if (std::exchange(user_.knows_zeros, true)) return false;
  const HoldLock held(lock_);
  options_.warn(
      fmt::format("shardplan: the model deviates from the plan on this rank alone: {}. Other ranks have that "
                  "gradient, and it is reduced with zeros of this one",
                  text));
  return false;
}

void Runtime::FireWithZeros() {
  now_.zeros_for_missing = true;
  Fire(TriggerKey(replayer_->Expected()));
  now_.zeros_for_missing = false;
}

std::vector<std::string> Runtime::Tell(const std::string& text) {
  if (!options_.consensus) return {text};
  const ReleaseLock unlocked(lock_);
  return options_.consensus->Tell(text);
}

// A forward under no_grad that is not in the plan is done on demand. Decided where it begins, for all of it.
bool Runtime::IsEvaluation(UnitId entered) {
  if (now_.evaluation_root != kNoUnit) {
    if (now_.evaluation_root != entered && !at::GradMode::is_enabled()) return true;
    now_.evaluation_root = kNoUnit;  // an exception ended that forward
    on_demand_.ReshardAll();
  }
  if (now_.forward_root != kNoUnit || at::GradMode::is_enabled() || fallback_.active()) return false;
  const PlanPosition next = tables_.order.NextHooked(Position());
  const Trigger& trigger = tables_.order.At(next);
  if (trigger.kind == TriggerKind::kPreForward && trigger.unit == entered &&
      tables_.order.HasNoBackward(next)) {
    return false;
  }
  AdoptChanges();
  now_.evaluation_root = entered;
  return true;
}

void Runtime::PreForward(UnitId unit, bool full_precision) {
  if (unit < 0) return;
  if (!user_.suspended.empty()) throw TrainingError(ErrorCode::kNegative, user_.suspended);
  if (IsEvaluation(unit)) return on_demand_.Unshard(unit, full_precision);
  CountUnseenBackward();
  const bool outermost = now_.forward_root == kNoUnit;
  if (outermost) {
    CheckIsNoMicrobatch();
    now_.forward_root = unit;
    if (!fallback_.active()) on_demand_.ReshardAll();
  }
  Pass(TriggerKind::kPreForward, unit, full_precision);
  if (outermost && !now_.backward_end_queued) now_.full_precision_forwards.push_back(full_precision);
}

std::vector<UnitId> Runtime::PostForward(UnitId unit) {
  if (unit < 0) return {};
  ++units_[unit].runs;
  const bool evaluates = now_.evaluation_root != kNoUnit;
  if (evaluates) {
    on_demand_.Reshard(unit);
  } else {
    Pass(TriggerKind::kPostForward, unit);
  }
  UnitId& root = evaluates ? now_.evaluation_root : now_.forward_root;
  if (root != unit) return {};
  root = kNoUnit;
  std::vector<UnitId> completed = groups_.Complete(unit);
  for (const UnitId other : completed) {
    ++units_[other].runs;
    if (evaluates) on_demand_.Reshard(other);
  }
  return completed;
}

void Runtime::NoteModule(TriggerKind kind, UnitId unit, std::int32_t module) {
  if (unit < 0 || now_.evaluation_root != kNoUnit) return;
  const Fallback::Passed passed{.kind = kind, .unit = unit, .grads = {}, .module = module};
  if (fallback_.active()) return fallback_.NoteModule(passed);
  now_.modules.push_back({Position(), passed});
}

// A checkpoint around a function that calls the unit several times runs it again behind the post-backward of
// a later call: it is sharded then.
void Runtime::Recompute(TriggerKind kind, UnitId unit) {
  UnitState& state = units_[unit];
  const bool enters = kind == TriggerKind::kPreForward;
  const TriggerKey& expected = replayer_->Expected();
  const bool planned = !fallback_.active() && expected.kind == kind && expected.unit == unit;
  const bool gathers = enters ? !state.unsharded && !plan_->units[unit].parameters.empty() && !state.flat
                              : state.gathered_again;
  if (planned || gathers) Pass(kind, unit);
  state.gathered_again = enters && gathers;
}

void Runtime::PreBackward(UnitId unit, std::int64_t run) {
  QueueBackwardEnd();
  if (unit < 0) return;
  UnitState& state = units_[unit];
  const bool another_run = std::exchange(state.run_in_backward, run) != run;
  if (state.in_backward) {
    if (fallback_.active() && state.flat && another_run) fallback_.NotePreBackward(unit);
    // Another output tensor of the unit: a point that a plan may name, but need not.
    const TriggerKey& expected = replayer_->Expected();
    if (expected.kind != TriggerKind::kPreBackward || expected.unit != unit) return;
  }
  Pass(TriggerKind::kPreBackward, unit);
  SetGradDTypes(unit, true);
  state.in_backward = true;
  state.backward_begun = true;
  groups_.InBackward(unit);
}

void Runtime::PostBackward(UnitId unit) {
  if (units_[unit].flat && !fallback_.active() && MissesPostBackward(unit)) return;
  units_[unit].in_backward = false;
  groups_.InBackward(unit);
  CountUnseenBackward();
  if (!now_.backward_end_queued) {
    now_.unseen_backward = torch::autograd::get_current_graph_task_id();
    now_.unit_of_unseen = unit;
  }
  Pass(TriggerKind::kPostBackward, unit);
  SetGradDTypes(unit, false);
}

void Runtime::QueueBackwardEnd() {
  if (now_.backward_end_queued) return;
  CountUnseenBackward();
  now_.unseen_backward = -1;
  now_.backward_end_queued = true;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->BackwardEnd(); });
  FollowSetters();
  if (fallback_.active() || !handover_.IsDropped()) return;
  Deviate("zero_grad() between micro-batches", "gradients that the backward adds to");
}

bool Runtime::IsOver(std::int64_t unseen_backward) const {
  return unseen_backward != -1 && unseen_backward != torch::autograd::get_current_graph_task_id();
}

void Runtime::CountUnseenBackward() {
  if (!IsOver(now_.unseen_backward)) return;
  ++now_.backwards;
  now_.unseen_backward = -1;
  if (now_.forward_root == now_.unit_of_unseen) now_.forward_root = kNoUnit;
}

void Runtime::BackwardEnd() {
  now_.backward_end_queued = false;
  ++now_.backwards;
  now_.reduced_all = ReducesAll();
  now_.forward_root = kNoUnit;  // of a recomputation that stopped early
  // Units none of whose inputs needed a gradient.
  while (!fallback_.active() && replayer_->Expected().kind == TriggerKind::kPostBackward) {
    const UnitId unit = replayer_->Expected().unit;
    if (!Deviates(TriggerKind::kPostBackward, unit)) {
      Fire(TriggerKey(replayer_->Expected()));
    } else if (Deviate(FoundText(TriggerKind::kBackwardEnd, -1), {}, /*only_missing=*/true)) {
      break;
    } else {
      FireWithZeros();
    }
  }
  const bool planned =
      fallback_.active() || tables_.order.IsLastBackward(tables_.order.NextHooked(Position()));
  const bool forgets = user_.is_last_backward.value_or(planned);
  Pass(TriggerKind::kBackwardEnd, -1);
  for (UnitState& unit : units_) {
    unit.in_backward = false;
    unit.backward_begun = false;
    if (unit.flat) unit.flat->Finish();
  }
  groups_.EndBackward(forgets);
  for (std::size_t unit = 0; unit < units_.size(); ++unit) SetGradDTypes(static_cast<UnitId>(unit), false);
  handover_.PublishAll(/*zeros=*/fallback_.active());
  if (!fallback_.active()) CheckNoGradientIsLeft();
  // If nobody sees the optimizer, the step is over with its last backward.
  if (fallback_.active() && !user_.optimizer_seen && !user_.awaits_optimizer &&
      fallback_.has_had_its_backwards() && Reduces(-1))
    EndFallback();
}

Status Runtime::BindUnsharded(UnitId unit, BufferId buffer) {
  SHARDPLAN_ASSERT(buffer >= 0, "what is bound is a buffer of the plan");
  const HoldLock held(lock_);
  if (units_[unit].flat) return BindFlatViews(unit, buffer);
  for (const auto& parameter : units_[unit].parameters) {
    if (Status status = parameter->BindUnsharded(); !status) return status;
  }
  units_[unit].unsharded = units_[unit].was_unsharded = true;
  return {};
}

Status Runtime::BindSharded(UnitId unit, BufferId) {
  const HoldLock held(lock_);
  for (const auto& parameter : units_[unit].parameters) {
    if (Status status = parameter->BindSharded(); !status) return status;
  }
  units_[unit].unsharded = false;
  if (units_[unit].flat) return units_[unit].flat->BindSharded();
  return {};
}

Status Runtime::TakeGradients(UnitId unit, BufferId buffer) {
  if (on_demand_.has_gradients_under_way()) return on_demand_.SupplyGradients(unit, buffer);
  if (units_[unit].flat) return TakeFlatGradients(unit, buffer);
  std::vector<at::Tensor> parts;
  parts.reserve(ParametersOf(buffer).size());
  for (const std::int32_t parameter : ParametersOf(buffer)) {
    at::Tensor grad = units_[unit].parameters[parameter]->LocalGradient();
    if (!grad.defined() && now_.zeros_for_missing) {
      const auto options =
          at::TensorOptions(ToScalarType(plan_->buffers[buffer].dtype)).device(device_->torch_device());
      grad = at::zeros(plan_->units[unit].parameters[parameter].shape, options);
    }
    if (!grad.defined()) {
      return MakeError(
          ErrorCode::kNegative,
          fmt::format("{} got no gradient in this backward, but the plan reduces it: the model does not "
                      "use it as in the trace",
                      ParameterText(*plan_, unit, parameter)));
    }
    parts.push_back(std::move(grad));
  }
  return device_->SetParts(buffer, std::move(parts));
}

Status Runtime::DropGradients(UnitId unit, BufferId buffer, std::span<const std::int32_t> parts) {
  if (units_[unit].flat) {
    if (parts.empty())
      units_[unit].flat->gradient().Clear();  // one flat gradient: it goes with the last part
    return {};
  }
  const auto drop = [&](std::int32_t parameter) {
    units_[unit].parameters[parameter]->unsharded_grad() = at::Tensor();
  };
  const std::span<const std::int32_t> parameters = ParametersOf(buffer);
  if (parts.empty()) std::ranges::for_each(parameters, drop);
  for (const std::int32_t part : parts) drop(parameters[part]);
  return {};
}

void Runtime::CheckNoGradientIsLeft() {
  // Another micro-batch follows, or the user's finalize_backward.
  if (!BetweenSteps() || tables_.order.NextUserCallsTakeGradients(Position())) return;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      if (!units_[unit].parameters[i]->unsharded_grad().defined()) continue;
      const std::string deviation = fmt::format(
          "{} got a gradient that the plan does not reduce: the model uses it in another way than in the "
          "trace",
          ParameterText(*plan_, static_cast<UnitId>(unit), static_cast<std::int32_t>(i)));
      Deviate(deviation);
      for (const UnitId held : on_demand_.UnitsWithGradients()) on_demand_.Reduce(held);
      if (!user_.optimizer_seen && !user_.awaits_optimizer && fallback_.has_had_its_backwards())
        EndFallback();
      return;
    }
  }
}

}  // namespace shardplan::executor
