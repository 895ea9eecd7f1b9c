// The hooks of FullyShardedDataParallel (_runtime_utils.py).
#include "policy/fsdp1/fsdp1_policy.h"

#include <fmt/format.h>

#include <algorithm>

#include "units/layout.h"

namespace shardplan {
Fsdp1Policy::Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder)
    : trace_(input.trace),
      index_(input.index),
      partition_(input.partition),
      strategy_(input.strategy),
      builder_(builder),
      optimizer_(input.strategy, input.partition, builder) {}

std::unique_ptr<Policy> MakeFsdp1Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<Fsdp1Policy>(input, builder);
}

std::string Fsdp1Policy::EventName(UnitId unit, std::string_view what) const {
  return fmt::format("{}.{}", DisplayName(UnitOf(unit).fqn), what);
}

Status Fsdp1Policy::SetUp() {
  const bool hybrid = std::ranges::any_of(partition_.units, [](const UnitChoice& choice) {
    return choice.unit.shard_communicator >= 0 && choice.unit.replicate_communicator >= 0;
  });
  const std::int32_t priority = hybrid && strategy_.fsdp1.limit_all_gathers ? -1 : 0;
  builder_.Stream("compute");
  unshard_stream_ = builder_.Stream("unshard", priority);
  post_backward_stream_ = builder_.Stream("post_backward", priority);
  pre_unshard_stream_ = builder_.Stream("pre_unshard", priority);
  if (Status status = CheckKnobs(); !status) return status;
  if (Status status = optimizer_.Check(); !status) return status;
  if (Status status = MakeHandles(); !status) return status;
  if (hybrid) all_reduce_stream_ = builder_.Stream("all_reduce");
  return {};
}

// What the runtime itself refuses.
Status Fsdp1Policy::CheckKnobs() const {
  const Fsdp1Knobs& knobs = strategy_.fsdp1;
  if (strategy_.optimizer.in_backward && !knobs.use_orig_params) {
    return MakeInputError("/optimizer/in_backward", "FSDP1 steps in the backward with use_orig_params only",
                          "true", "fsdp1.use_orig_params true");
  }
  if (knobs.comm_hook == Fsdp1CommHook::kNone) return {};
  for (const UnitChoice& choice : partition_.units) {
    const bool sharded = choice.unit.shard_communicator >= 0;
    if (sharded && choice.unit.replicate_communicator >= 0) {
      return MakeInputError("/fsdp1/comm_hook", "FSDP1 has no communication hooks with hybrid sharding");
    }
    if (choice.unit.parameters.empty()) continue;
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
  handles_.resize(partition_.units.size());
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    const Unit& unit = partition_.units[u].unit;
    const UnitId id = static_cast<UnitId>(u);
    Handle& handle = handles_[u];
    handle.exists = !unit.parameters.empty();
    if (!handle.exists) continue;
    const auto trains = [](const UnitParameter& p) { return p.requires_grad; };
    handle.requires_grad = std::any_of(unit.parameters.begin(), unit.parameters.end(), trains);
    const bool all = std::all_of(unit.parameters.begin(), unit.parameters.end(), trains);
    if (handle.requires_grad && !all && !strategy_.fsdp1.use_orig_params) {
      return MakeInputError("/fsdp1/use_orig_params",
                            "a unit has trainable and frozen parameters, which needs use_orig_params",
                            DisplayName(unit.fqn), "true");
    }
    const UnitParameter& last = unit.parameters.back();
    handle.numel = strategy_.fsdp1.use_orig_params ? unit.flat_numel : last.flat_offset + Numel(last);
    SetHandleKnobs(id);
    MakeParamBuffers(id);
  }
  return {};
}

void Fsdp1Policy::SetHandleKnobs(UnitId id) {
  Handle& handle = handles_[id];
  const UnitChoice& choice = partition_.units[id];
  const Fsdp1Sharding sharding = choice.sharding;
  // On one rank FSDP1 switches to NO_SHARD.
  handle.sharded = sharding != Fsdp1Sharding::kNoShard && choice.unit.shard_communicator >= 0;
  handle.ranks =
      handle.sharded ? partition_.communicators[choice.unit.shard_communicator].size : std::int64_t{1};
  handle.reshards_after_forward =
      handle.sharded && (sharding == Fsdp1Sharding::kFullShard || sharding == Fsdp1Sharding::kHybridShard);
  handle.offloads = choice.cpu_offload;
  // Pinning makes a copy, the local shard; the flat parameter points to it from its first reshard on.
  handle.points_to_shard = !handle.offloads;
  handle.forward_prefetch = choice.forward_prefetch;
  handle.backward_prefetch = choice.backward_prefetch;
  handle.casts_params = choice.unit.param_dtype != choice.unit.orig_dtype;
}

void Fsdp1Policy::MakeParamBuffers(UnitId id) {
  Handle& handle = handles_[id];
  const Unit& unit = UnitOf(id);
  const std::int64_t numel = unit.flat_numel / handle.ranks;
  handle.param_sharded = FlatBuffer(id, BufferRole::kParamSharded, unit.orig_dtype, numel, {},
                                    handle.offloads ? MemoryKind::kPinnedHost : MemoryKind::kDevice);
  // Without sharding the copy of the shard is what the modules use.
  const BufferRole copy_role = handle.sharded ? BufferRole::kAllGatherInput : BufferRole::kParamUnsharded;
  if (handle.sharded) {
    handle.unsharded.buffer = FlatBuffer(id, BufferRole::kParamUnsharded, unit.param_dtype, unit.flat_numel);
  }
  if (handle.sharded && handle.casts_params) MakeFullPrecisionBuffer(id);
  if (handle.casts_params) handle.low_precision.buffer = FlatBuffer(id, copy_role, unit.param_dtype, numel);
  if (handle.offloads) {
    // _cpu_grad: there for ever, or, stepped and dropped in the backward, from one forward to its backward.
    Buffer host = builder_.plan().buffers[FlatBuffer(id, BufferRole::kParamSharded, unit.orig_dtype, numel,
                                                     {}, MemoryKind::kPinnedHost)];
    host.name = EventName(id, Name(BufferRole::kGradHost));
    host.role = BufferRole::kGradHost;
    host.persistent = !strategy_.optimizer.in_backward;
    handle.host_grad = {builder_.AddBuffer(std::move(host)), false};
  }
}

void Fsdp1Policy::MakeFullPrecisionBuffer(UnitId id) {
  const Unit& unit = UnitOf(id);
  handles_[id].full.buffer =
      FlatBuffer(id, BufferRole::kParamUnsharded, unit.orig_dtype, unit.flat_numel, "full_precision");
}

BufferId Fsdp1Policy::FlatBuffer(UnitId id, BufferRole role, DType dtype, std::int64_t numel,
                                 std::string_view suffix, MemoryKind memory) {
  std::vector<std::int32_t> all(UnitOf(id).parameters.size());
  for (std::size_t p = 0; p < all.size(); ++p) all[p] = static_cast<std::int32_t>(p);
  return builder_.UnitBuffer(id, role, dtype, {Bytes{numel * SizeBytes(dtype)}}, std::move(all), suffix,
                             memory);
}

Status Fsdp1Policy::On(const HostEvent& event) {
  switch (event.kind) {
    case HostEventKind::kSegment:
      OnSegment(event);
      break;
    case HostEventKind::kForwardBegin:
      OnForwardBegin(event);
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
      break;
    case HostEventKind::kForwardUndone:
      OnForwardUndone(event);
      break;
    case HostEventKind::kInputsGradDone:
      OnInputsGradDone(event);
      break;
    case HostEventKind::kBackwardBegin:
      OnBackwardBegin(event);
      break;
    case HostEventKind::kBackwardEnd:
      BackwardEnd(event);
      break;
    case HostEventKind::kOptimizerStep:
      OptimizerStep(event);
      break;
    case HostEventKind::kZeroGrad:
      ZeroGrad(event);
      break;
    case HostEventKind::kModuleCall:
      return UserCall(event);
    case HostEventKind::kParameterGradsDone:
    case HostEventKind::kForwardEnd:
      break;
  }
  return {};
}

Status Fsdp1Policy::UserCall(const HostEvent& event) {
  if (event.call->method == "summon_full_params" && event.call->module.empty()) LazyInit();
  builder_.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  if (event.call->method == "no_sync") {  // enters (true) or leaves the context manager
    sync_gradients_ = !event.call->value.value_or(true);
  } else if (event.call->method == "set_requires_gradient_sync") {
    sync_gradients_ = event.call->value.value_or(true);
  } else if (event.call->method == "summon_full_params") {
    return SummonFullParams(event);
  } else {
    return MakeInputError("/program", "fsdp1 does not know this call", event.call->method,
                          "no_sync, set_requires_gradient_sync or summon_full_params");
  }
  return {};
}

void Fsdp1Policy::OnSegment(const HostEvent& event) {
  std::vector<UnitId> reads;
  if (event.range.backward) {
    const Pass& pass = trace_.backwards[event.range.pass];
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

// FlatParamHandle.init_flat_param_attributes: what will hold the parameters is allocated once and emptied.
void Fsdp1Policy::LazyInit() {
  if (initialized_) return;
  initialized_ = true;
  builder_.BeginTrigger(TriggerKind::kLazyInit, -1, 0);
  builder_.SetReason("lazy_init");
  for (const UnitId id : partition_.states) {
    Handle& handle = handles_[id];
    builder_.SetUnit(id);
    for (Copy* copy : {&handle.low_precision, &handle.unsharded, &handle.full}) {
      if (copy->buffer < 0) continue;
      AllocateOn(*copy, kCompute);
      FreeCopy(*copy, kCompute);
    }
  }
}

void Fsdp1Policy::RootPreForward() {
  if (partition_.units[0].forward_prefetch) {
    for (Handle& handle : handles_) {
      handle.needs_pre_forward_unshard = true;
      handle.prefetched = false;
    }
  }
  builder_.WaitStream(unshard_stream_, kCompute, "forward_begin");
  builder_.Wait(builder_.Event("forward_begin"), pre_unshard_stream_);
  DropZeroedGrads();
}

void Fsdp1Policy::PreForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Handle& handle = handles_[unit];
  const bool enters_root = partition_.units[unit].is_root && event.kind == HostEventKind::kPreForward;
  if (enters_root) LazyInit();
  builder_.BeginTrigger(TriggerKind::kPreForward, unit, event.microbatch);
  builder_.SetReason("pre_forward");
  if (enters_root) RootPreForward();
  std::int32_t& calls = calls_[{unit, event.microbatch}];
  current_call_ = {unit, calls, event.microbatch};
  const bool recomputes = event.kind == HostEventKind::kRecomputePreForward;
  if (!recomputes) ++calls;
  if (!handle.exists || handle.training == TrainingState::kBackwardPre) return;
  if (strategy_.fsdp1.validate_execution_order && first_iteration_ && event.training) CheckOrder();
  if (first_iteration_ && !handle.pre_forward_index) {
    handle.pre_forward_index = static_cast<std::int32_t>(pre_forward_order_.size());
    pre_forward_order_.push_back(unit);
  }
  handle.training = TrainingState::kForward;
  if (!handle.prefetched) {
    Unshard(unit, "pre_forward");
    if (!recomputes) handle.views = current_call_;
  }
  handle.needs_pre_forward_unshard = false;
  WaitForUnshard(unit);
  const UnitId target = Prefetch(unit, /*forward=*/true);
  if (target >= 0 && !recomputes) handles_[target].views = current_call_;
  if (event.grad_enabled && !recomputes && handle.requires_grad) {
    handle.uses.push_back({current_call_, handle.views});
    if (!handle.hook) handle.hook = handle.views;
  } else if (recomputes && handle.requires_grad && !handle.hook) {
    // Hooked anew behind an earlier backward: on the accumulator that the forward's gradients go to, unless
    // casts have made others.
    handle.hook = handle.casts_params ? Call{} : handle.views;
    FindWhereItFires(handle);
  }
  if (handle.offloads && strategy_.optimizer.in_backward) AllocateOn(handle.host_grad, kHost);
  if (event.grad_enabled && !handle.requires_grad && !handle.hooked_inputs) {
    handle.hooked_inputs = current_call_;
  }
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
  Reshard(unit, !is_root && handle.reshards_after_forward, event.grad_enabled);
  if (event.grad_enabled) {
    if (is_root) final_callback_queued_ = false;
    handle.ran_pre_backward_hook = false;
    handle.needs_pre_backward_unshard = event.outputs_require_grad;
  }
  handle.training = TrainingState::kIdle;
}

void Fsdp1Policy::OnForwardBegin(const HostEvent& event) {
  std::erase_if(calls_, [&](const auto& call) { return call.first.second == event.microbatch; });
  for (Handle& handle : handles_) {
    std::erase_if(handle.uses, [&](const Use& use) { return use.call.microbatch == event.microbatch; });
  }
  training_ = event.training;
}

void Fsdp1Policy::OptimizerStep(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  std::vector<SteppedUnit> units;
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    if (handles_[u].has_sharded_grad && !zeroed_) units.push_back({.unit = static_cast<UnitId>(u)});
  }
  optimizer_.Step(units);
}

void Fsdp1Policy::ZeroGrad(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  zeroed_ = true;
  if (!strategy_.fsdp1.use_orig_params) DropZeroedGrads();
}

// The user drops the gradients of the original parameters; FSDP1 then drops that of the flat parameter, when
// it looks at it next (_reset_flat_param_grad_info_if_needed).
void Fsdp1Policy::DropZeroedGrads() {
  if (!zeroed_) return;
  zeroed_ = false;
  const std::string reason = builder_.reason();
  const UnitId unit = builder_.unit();
  builder_.SetReason("zero_grad");
  builder_.SetUnit(-1);
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  for (std::size_t u = 0; u < handles_.size(); ++u) {
    Handle& handle = handles_[u];
    handle.has_sharded_grad = handle.has_low_grad = false;
    handle.contributions.clear();
    if (handle.has_flat_grad) {  // of micro-batches that did not reduce
      dropped_unreduced_ = true;
      builder_.SetUnit(static_cast<UnitId>(u));
      builder_.Free(FlatGrad(static_cast<UnitId>(u)), kCompute);
      handle.has_flat_grad = false;
    }
  }
  builder_.SetReason(reason);
  builder_.SetUnit(unit);
}

std::unique_ptr<PolicyState> Fsdp1Policy::State() const {
  std::string state = fmt::format("{} {} {} {} [{}] [{}] [{}]|", first_iteration_, sync_gradients_,
                                  final_callback_queued_, zeroed_, fmt::join(pre_forward_order_, ","),
                                  fmt::join(post_forward_order_, ","), fmt::join(free_events_, ","));
  for (const Handle& h : handles_) {
    state += fmt::format("{} {}{}{}{} {} {} {}{}{} {} {}{} {};", static_cast<int>(h.training),
                         h.needs_pre_forward_unshard, h.needs_pre_backward_unshard, h.prefetched,
                         h.ran_pre_backward_hook, h.post_forward_index.value_or(-1),
                         h.pre_forward_index.value_or(-1), h.unsharded.allocated, h.points_to_shard,
                         h.skipped_sharded_views, fmt::join(h.grads, ","), h.has_flat_grad,
                         h.has_sharded_grad, h.hook.has_value());
    const auto call = [](const Call& c) {
      return fmt::format("{}.{}.{} ", c.unit, c.occurrence, c.microbatch);
    };
    state += h.hook ? call(*h.hook) : "";
    state += h.prefetched ? call(h.views) : "";
    for (const Use& use : h.uses) state += call(use.call) + call(use.views);
    state += fmt::format("{}{}{}{}{};", h.full.allocated, h.low_precision.allocated, h.device_shard.allocated,
                         h.device_grad.allocated, h.has_low_grad);
    if (zeroed_) state += h.contributions;
    state += fmt::format("{}{}{};", h.saved_grad, h.post_backward_called, h.summoned);
  }
  return std::make_unique<PolicyStateOf<std::pair<std::string, OptimizerMemory::State>>>(
      std::pair{std::move(state), optimizer_.state()});
}

}  // namespace shardplan
