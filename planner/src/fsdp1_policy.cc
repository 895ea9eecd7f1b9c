// The hooks of FullyShardedDataParallel (_runtime_utils.py).
#include "fsdp1_policy.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout.h"

namespace shardplan {
namespace {

constexpr StreamId kCompute = 0;

}  // namespace

Fsdp1Policy::Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder)
    : trace_(input.trace),
      partition_(input.partition),
      strategy_(input.strategy),
      builder_(builder),
      optimizer_(input.strategy.optimizer, input.partition, builder) {}

std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<Fsdp1Policy>(input, builder);
}

bool Fsdp1Policy::ReshardsAfterForward() const {
  return Sharded() && (strategy_.fsdp1.sharding == Fsdp1Sharding::kFullShard ||
                       strategy_.fsdp1.sharding == Fsdp1Sharding::kHybridShard);
}

std::string Fsdp1Policy::EventName(UnitId unit, std::string_view what) const {
  return fmt::format("{}.{}", DisplayName(UnitOf(unit).fqn), what);
}

Status Fsdp1Policy::SetUp() {
  const bool hybrid = partition_.replicate_size > 1;
  const std::int32_t priority = hybrid && strategy_.fsdp1.limit_all_gathers ? -1 : 0;
  builder_.Stream("compute");
  unshard_stream_ = builder_.Stream("unshard", priority);
  post_backward_stream_ = builder_.Stream("post_backward", priority);
  pre_unshard_stream_ = builder_.Stream("pre_unshard", priority);
  if (hybrid && Sharded()) all_reduce_stream_ = builder_.Stream("all_reduce");
  return MakeHandles();
}

Status Fsdp1Policy::MakeHandles() {
  handles_.resize(partition_.units.size());
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    const Unit& unit = partition_.units[u].unit;
    const UnitId id = static_cast<UnitId>(u);
    Handle& handle = handles_[u];
    handle.exists = !unit.parameters.empty();
    if (!handle.exists) continue;
    if (partition_.units[u].cpu_offload) {
      return MakeInputError("/cpu_offload", "fsdp1 plans do not offload; fsdp2 plans do", "true", "false");
    }
    const auto trains = [](const UnitParameter& p) { return p.requires_grad; };
    handle.requires_grad = std::any_of(unit.parameters.begin(), unit.parameters.end(), trains);
    const bool all = std::all_of(unit.parameters.begin(), unit.parameters.end(), trains);
    handle.partly_frozen = handle.requires_grad && !all;
    if (handle.partly_frozen && !strategy_.fsdp1.use_orig_params) {
      return MakeInputError("/fsdp1/use_orig_params",
                            "a unit has trainable and frozen parameters, which needs use_orig_params",
                            DisplayName(unit.fqn), "true");
    }
    const UnitParameter& last = unit.parameters.back();
    handle.numel = strategy_.fsdp1.use_orig_params ? unit.flat_numel : last.flat_offset + Numel(last);
    handle.casts_params = unit.param_dtype != unit.orig_dtype;
    const std::int64_t ranks = Sharded() ? partition_.shard_size : 1;
    handle.param_sharded =
        FlatBuffer(id, BufferRole::kParamSharded, unit.orig_dtype, unit.flat_numel / ranks);
    if (Sharded()) {
      handle.param_unsharded = FlatBuffer(id, BufferRole::kParamUnsharded, unit.param_dtype, unit.flat_numel);
    }
    if (handle.casts_params) {
      // Without sharding the low-precision copy is what the modules use.
      const BufferRole role = Sharded() ? BufferRole::kAllGatherInput : BufferRole::kParamUnsharded;
      handle.low_precision = FlatBuffer(id, role, unit.param_dtype, unit.flat_numel / ranks);
    }
  }
  return {};
}

BufferId Fsdp1Policy::FlatBuffer(UnitId id, BufferRole role, DType dtype, std::int64_t numel,
                                 std::string_view suffix) {
  std::vector<std::int32_t> all(UnitOf(id).parameters.size());
  for (std::size_t p = 0; p < all.size(); ++p) all[p] = static_cast<std::int32_t>(p);
  return builder_.UnitBuffer(id, role, dtype, {Bytes{numel * SizeBytes(dtype)}}, std::move(all), suffix);
}

Status Fsdp1Policy::On(const HostEvent& event) {
  // A frozen unit's reshard hangs on the gradient of its input, behind the pre-backward hook of the unit that
  // made that tensor.
  const bool between = event.kind == HostEventKind::kSegment || event.kind == HostEventKind::kInputsGradDone;
  if (reshard_only_ >= 0 && event.kind != HostEventKind::kPreBackward && !between) RunReshardOnly();
  switch (event.kind) {
    case HostEventKind::kSegment:
      OnSegment(event);
      break;
    case HostEventKind::kForwardBegin:
      first_forward_.clear();
      break;
    case HostEventKind::kPreForward:
    case HostEventKind::kRecomputePreForward:
      PreForward(event);
      break;
    case HostEventKind::kPostForward:
    case HostEventKind::kRecomputePostForward:
      PostForward(event);
      break;
    case HostEventKind::kPreBackward:
      PreBackward(event);
      if (reshard_only_ >= 0) RunReshardOnly();
      break;
    case HostEventKind::kParameterGradsDone:
      OnParameterGradsDone(event);
      break;
    case HostEventKind::kInputsGradDone:
      OnInputsGradDone(event);
      break;
    case HostEventKind::kBackwardBegin:
      backward_unit_ = -1;
      break;
    case HostEventKind::kBackwardEnd:
      FinalCallback(event);
      break;
    case HostEventKind::kOptimizerStep:
      OptimizerStep(event);
      break;
    case HostEventKind::kZeroGrad:
      ZeroGrad(event);
      break;
    case HostEventKind::kModuleCall:
      return UserCall(event);
    case HostEventKind::kForwardEnd:
      break;
  }
  return {};
}

Status Fsdp1Policy::UserCall(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  if (event.call->method == "no_sync") {  // enters (true) or leaves the context manager
    sync_gradients_ = !event.call->value.value_or(true);
  } else if (event.call->method == "set_requires_gradient_sync") {
    sync_gradients_ = event.call->value.value_or(true);
  } else {
    return MakeInputError("/program", "fsdp1 does not know this call", event.call->method, "no_sync");
  }
  return {};
}

void Fsdp1Policy::OnSegment(const HostEvent& event) {
  std::vector<UnitId> reads;
  if (event.range.backward) {
    const Pass& pass = trace_.backwards[event.range.pass];
    const bool computes =
        std::any_of(pass.events.begin() + event.range.begin, pass.events.begin() + event.range.end,
                    [](const TraceEvent& e) { return std::holds_alternative<OperatorEvent>(e); });
    if (reshard_only_ >= 0 && computes) RunReshardOnly();
    if (backward_unit_ >= 0 && handles_[backward_unit_].exists && !handles_[backward_unit_].points_to_shard) {
      reads.push_back(backward_unit_);
    }
    for (std::int32_t i = event.range.begin; i < event.range.end; ++i) {
      const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
      if (grad == nullptr) continue;
      const UnitParameterRef owner = OwnerOf(partition_, grad->parameter, -1);
      if (owner.unit >= 0) handles_[owner.unit].grads.insert(owner.parameter);
    }
  }
  builder_.Compute(event, {}, reads);
}

void Fsdp1Policy::RootPreForward() {
  if (strategy_.fsdp1.forward_prefetch) {
    for (Handle& handle : handles_) {
      handle.needs_pre_forward_unshard = true;
      handle.prefetched = false;
    }
  }
  builder_.WaitStream(unshard_stream_, kCompute, "forward_begin");
  builder_.Wait(builder_.Event("forward_begin"), pre_unshard_stream_);
}

void Fsdp1Policy::PreForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Handle& handle = handles_[unit];
  builder_.BeginTrigger(TriggerKind::kPreForward, unit, event.microbatch);
  builder_.SetReason("pre_forward");
  if (partition_.units[unit].is_root && event.kind == HostEventKind::kPreForward) RootPreForward();
  if (!handle.exists || handle.training == TrainingState::kBackwardPre) return;
  first_forward_.push_back(unit);
  if (first_iteration_ && !handle.pre_forward_index) {
    handle.pre_forward_index = static_cast<std::int32_t>(pre_forward_order_.size());
    pre_forward_order_.push_back(unit);
  }
  handle.training = TrainingState::kForward;
  if (!handle.prefetched) {
    Unshard(unit, "pre_forward");
    handle.views_made_in = unit;
  }
  handle.needs_pre_forward_unshard = false;
  WaitForUnshard(unit);
  Prefetch(unit, /*forward=*/true);
  if (event.grad_enabled && !handle.requires_grad) handle.hooked_inputs = true;
}

void Fsdp1Policy::PostForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Handle& handle = handles_[unit];
  builder_.BeginTrigger(TriggerKind::kPostForward, unit, event.microbatch);
  builder_.SetReason("post_forward");
  const bool is_root = partition_.units[unit].is_root;
  if (!handle.exists) {
    if (is_root && event.grad_enabled) final_callback_queued_ = false;
    return;
  }
  if (handle.training == TrainingState::kBackwardPre) return;
  // An index of 0 counts as none here (`if handle._post_forward_index:`), so that a first unit that runs
  // again gets the index of its later use.
  if (!handle.post_forward_index || *handle.post_forward_index == 0) {
    handle.post_forward_index = static_cast<std::int32_t>(post_forward_order_.size());
  }
  post_forward_order_.push_back(unit);
  Reshard(unit, !is_root && ReshardsAfterForward(), event.grad_enabled);
  if (event.grad_enabled) {
    if (is_root) final_callback_queued_ = false;
    handle.ran_pre_backward_hook = false;
    handle.needs_pre_backward_unshard = event.outputs_require_grad;
  }
  handle.training = TrainingState::kIdle;
}

void Fsdp1Policy::PreBackward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Handle& handle = handles_[unit];
  RunPostBackwardsOlderThan(unit, event.microbatch);
  builder_.BeginTrigger(TriggerKind::kPreBackward, unit, event.microbatch);
  if (handle.exists && handle.ran_pre_backward_hook) return;
  builder_.SetReason("pre_backward");
  if (partition_.units[unit].is_root) final_callback_queued_ = true;
  if (!handle.exists) return;
  backward_unit_ = unit;
  handle.training = TrainingState::kBackwardPre;
  if (handle.needs_pre_backward_unshard) {
    if (!handle.prefetched) Unshard(unit, "pre_backward");
    WaitForUnshard(unit);
  }
  handle.needs_pre_backward_unshard = false;
  Prefetch(unit, /*forward=*/false);
  handle.ran_pre_backward_hook = true;
}

void Fsdp1Policy::OnParameterGradsDone(const HostEvent& event) {
  Handle& handle = handles_[event.unit];
  handle.grads_done = true;
  // Of a flat parameter with frozen parts every part gets a gradient: it is done with the unit, not before.
  if (!handle.partly_frozen) RunDuePostBackwards(event.unit, event.microbatch);
}

// post_backward of every unit whose views were made in `creator`'s pre-forward, newest views first.
void Fsdp1Policy::RunDuePostBackwards(UnitId creator, std::int32_t microbatch) {
  for (auto unit = first_forward_.rbegin(); unit != first_forward_.rend(); ++unit) {
    Handle& handle = handles_[*unit];
    if (!handle.grads_done || handle.views_made_in != creator || *unit == creator) continue;
    PostBackward(*unit, microbatch);
  }
  if (handles_[creator].grads_done && handles_[creator].views_made_in == creator) {
    PostBackward(creator, microbatch);
  }
}

// Everything newer than the outputs of `unit` has run: the views that were made after its forward, too.
void Fsdp1Policy::RunPostBackwardsOlderThan(UnitId unit, std::int32_t microbatch) {
  const auto at = std::find(first_forward_.begin(), first_forward_.end(), unit);
  if (at == first_forward_.end() || partition_.units[unit].is_root) return;
  for (auto later = first_forward_.rbegin(); later.base() != at + 1; ++later) {
    RunDuePostBackwards(*later, microbatch);
  }
}

void Fsdp1Policy::OnInputsGradDone(const HostEvent& event) {
  if (!handles_[event.unit].hooked_inputs) return;
  if (reshard_only_ >= 0) RunReshardOnly();
  reshard_only_ = event.unit;
  reshard_only_microbatch_ = event.microbatch;
}

void Fsdp1Policy::RunReshardOnly() {
  const UnitId unit = reshard_only_;
  reshard_only_ = -1;
  builder_.BeginTrigger(TriggerKind::kPostBackward, unit, reshard_only_microbatch_);
  builder_.SetReason("reshard_only");
  handles_[unit].training = TrainingState::kBackwardPost;
  PostBackwardReshard(unit);
}

void Fsdp1Policy::FinalCallback(const HostEvent& event) {
  for (auto unit = first_forward_.rbegin(); unit != first_forward_.rend(); ++unit) {
    RunDuePostBackwards(*unit, event.microbatch);
  }
  builder_.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  backward_unit_ = -1;
  if (!final_callback_queued_) return;
  builder_.SetReason("final");
  if (sync_gradients_) {
    builder_.WaitStream(kCompute, post_backward_stream_, "backward_end.post_backward");
    if (all_reduce_stream_ >= 0) builder_.WaitStream(kCompute, all_reduce_stream_, "backward_end.all_reduce");
  }
  first_iteration_ = false;
  post_forward_order_.clear();
  for (const UnitId unit : partition_.states) {
    Handle& handle = handles_[unit];
    if (!handle.exists) continue;
    builder_.SetUnit(unit);
    if (!handle.points_to_shard || handle.skipped_sharded_views) Reshard(unit, FreesInBackward());
    handle.ran_pre_backward_hook = handle.needs_pre_backward_unshard = handle.prefetched = false;
    handle.post_forward_index.reset();
    handle.training = TrainingState::kIdle;
    handle.hooked_inputs = false;
  }
  final_callback_queued_ = false;
}

void Fsdp1Policy::OptimizerStep(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  std::vector<UnitId> units;
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    if (handles_[u].has_sharded_grad) units.push_back(static_cast<UnitId>(u));
  }
  optimizer_.Step(units);
}

void Fsdp1Policy::ZeroGrad(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  builder_.SetReason("user");
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  for (Handle& handle : handles_) handle.has_sharded_grad = false;
}

std::string Fsdp1Policy::State() const {
  std::string state = fmt::format("{} {} {} [{}] [{}] [{}]|", first_iteration_, sync_gradients_,
                                  final_callback_queued_, fmt::join(pre_forward_order_, ","),
                                  fmt::join(post_forward_order_, ","), fmt::join(free_events_, ","));
  for (const Handle& h : handles_) {
    state += fmt::format("{} {}{}{}{} {} {} {}{}{} {} {}{} {};", static_cast<int>(h.training),
                         h.needs_pre_forward_unshard, h.needs_pre_backward_unshard, h.prefetched,
                         h.ran_pre_backward_hook, h.post_forward_index.value_or(-1),
                         h.pre_forward_index.value_or(-1), h.unsharded_allocated, h.points_to_shard,
                         h.skipped_sharded_views, fmt::join(h.grads, ","), h.has_flat_grad,
                         h.has_sharded_grad, h.views_made_in);
  }
  return state + optimizer_.State();
}

}  // namespace shardplan
