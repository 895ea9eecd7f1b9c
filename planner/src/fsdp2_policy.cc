// The hooks of FSDPState and the calls of FSDPModule (_fsdp_state.py, _fully_shard.py).
#include "fsdp2_policy.h"

#include <fmt/format.h>

#include <algorithm>

#include "layout.h"

namespace shardplan {
namespace {

constexpr StreamId kCompute = 0;

std::string ListState(const auto& list) { return fmt::format("[{}]", fmt::join(list, ",")); }

}  // namespace

Fsdp2Policy::Fsdp2Policy(const PolicyInput& input, ProgramBuilder& builder)
    : trace_(input.trace),
      index_(input.index),
      partition_(input.partition),
      strategy_(input.strategy),
      steps_(input.steps),
      builder_(builder),
      optimizer_(input.strategy.optimizer, input.partition, builder),
      unshard_async_op_(input.strategy.fsdp2.unshard_async_op),
      gradient_divide_factor_(input.strategy.fsdp2.gradient_divide_factor),
      force_sum_reduction_(input.strategy.fsdp2.force_sum_reduction) {}

std::unique_ptr<Policy> MakeFsdp2Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<Fsdp2Policy>(input, builder);
}

Status Fsdp2Policy::SetUp() {
  builder_.Stream("compute");
  copy_in_stream_ = builder_.Stream("all_gather_copy_in", -1);
  all_gather_stream_ = builder_.Stream("all_gather", -1);
  reduce_scatter_stream_ = builder_.Stream("reduce_scatter", -1);
  if (partition_.replicate_size > 1) all_reduce_stream_ = builder_.Stream("all_reduce");
  MakeGroups();
  SetPrefetchDistances();
  if (Status s =
          SetPrefetchLists(strategy_.fsdp2.forward_prefetch_lists, "/fsdp2/forward_prefetch_lists", true);
      !s) {
    return s;
  }
  if (Status s =
          SetPrefetchLists(strategy_.fsdp2.backward_prefetch_lists, "/fsdp2/backward_prefetch_lists", false);
      !s) {
    return s;
  }
  for (std::size_t c = 0; c < strategy_.setup.size(); ++c) {
    if (Status s = Setter(strategy_.setup[c]); !s) {
      return MakeInputError(fmt::format("/setup/{}", c), s.error().message, s.error().found,
                            s.error().expected);
    }
  }
  return {};
}

void Fsdp2Policy::MakeGroups() {
  groups_.resize(partition_.units.size());
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    const UnitChoice& choice = partition_.units[u];
    const Unit& unit = choice.unit;
    const UnitId id = static_cast<UnitId>(u);
    Group& group = groups_[u];
    group.has_parameters = !unit.parameters.empty();
    group.post_forward_size = choice.post_forward_size;
    group.casts_params = unit.param_dtype != unit.orig_dtype;
    group.offloads = choice.cpu_offload;
    group.grad_dtype = unit.param_dtype;
    if (!group.has_parameters) continue;
    std::vector<std::int32_t> all(unit.parameters.size());
    for (std::size_t p = 0; p < all.size(); ++p) all[p] = static_cast<std::int32_t>(p);
    const std::int64_t ranks = ShardRanks(id);
    group.param_sharded =
        builder_.UnitBuffer(id, BufferRole::kParamSharded, unit.orig_dtype,
                            ShardParts(unit, ranks, unit.orig_dtype), all, {}, ShardMemory(id));
    group.param_unsharded = builder_.UnitBuffer(id, BufferRole::kParamUnsharded, unit.param_dtype,
                                                GatheredParts(unit, ranks, unit.param_dtype), all);
  }
}

// forward_prefetch / backward_prefetch as distances: explicit lists over the units in forward order, the root
// left as it is (what torchtitan sets).
void Fsdp2Policy::SetPrefetchDistances() {
  const Fsdp2Knobs& knobs = strategy_.fsdp2;
  std::vector<UnitId> order;
  for (const HostEvent& event : steps_.front().events) {
    if (event.kind == HostEventKind::kForwardEnd) break;
    if (event.kind != HostEventKind::kPreForward || !groups_[event.unit].has_parameters) continue;
    if (partition_.units[event.unit].is_root) continue;
    if (std::find(order.begin(), order.end(), event.unit) == order.end()) order.push_back(event.unit);
  }
  const auto count = static_cast<std::int32_t>(order.size());
  for (std::int32_t i = 0; i < count; ++i) {
    for (std::int32_t d = 1; d <= knobs.forward_prefetch && i + d < count; ++d) {
      groups_[order[i]].forward_prefetch.push_back(order[i + d]);
    }
    for (std::int32_t d = 1; d <= knobs.backward_prefetch && i - d >= 0; ++d) {
      groups_[order[i]].backward_prefetch.push_back(order[i - d]);
    }
  }
  for (Group& group : groups_) group.default_backward_prefetch = knobs.backward_prefetch != 0;
}

Status Fsdp2Policy::SetPrefetchLists(const std::vector<PrefetchList>& lists, std::string_view pointer,
                                     bool forward) {
  const auto unit_of = [&](const std::string& fqn) -> UnitId {
    for (std::size_t u = 0; u < partition_.units.size(); ++u) {
      if (partition_.units[u].unit.fqn == fqn) return static_cast<UnitId>(u);
    }
    const auto found = index_.by_fqn.find(fqn);
    return found == index_.by_fqn.end() ? -1 : partition_.unit_of_module[index_.canonical[found->second]];
  };
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const UnitId unit = unit_of(lists[i].unit);
    if (unit < 0) {
      return MakeInputError(fmt::format("{}/{}/unit", pointer, i), "there is no such unit", lists[i].unit);
    }
    std::vector<UnitId>& targets = forward ? groups_[unit].forward_prefetch : groups_[unit].backward_prefetch;
    targets.clear();
    for (std::size_t t = 0; t < lists[i].prefetch.size(); ++t) {
      const UnitId target = unit_of(lists[i].prefetch[t]);
      if (target < 0) {
        return MakeInputError(fmt::format("{}/{}/prefetch/{}", pointer, i, t), "there is no such unit",
                              lists[i].prefetch[t]);
      }
      targets.push_back(target);
    }
  }
  return {};
}

std::vector<UnitId> Fsdp2Policy::UnitsUnder(const ModuleCall& call, UnitId unit) const {
  if (!call.recurse) return unit < 0 ? std::vector<UnitId>{} : std::vector<UnitId>{unit};
  std::vector<UnitId> units;
  for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
    const std::string& fqn = trace_.modules[m].fqn;
    const bool under = call.module.empty() || fqn == call.module || fqn.starts_with(call.module + ".");
    const UnitId inside = partition_.unit_of_module[index_.canonical[m]];
    if (under && inside >= 0 && std::find(units.begin(), units.end(), inside) == units.end()) {
      units.push_back(inside);
    }
  }
  return units;
}

Status Fsdp2Policy::Setter(const ModuleCall& call) {
  const auto found = index_.by_fqn.find(call.module);
  if (found == index_.by_fqn.end()) return MakeInputError("", "there is no such module", call.module);
  const UnitId unit = partition_.unit_of_module[index_.canonical[found->second]];
  const bool value = call.value.value_or(true);
  if (call.method == "set_is_last_backward") {
    is_last_backward_ = value;
    return {};
  }
  if (call.method == "set_force_sum_reduction_for_comms") {
    force_sum_reduction_ = value;
    return {};
  }
  for (const UnitId target : UnitsUnder(call, unit)) {
    Group& group = groups_[target];
    if (call.method == "set_requires_gradient_sync") {
      group.reduce_grads = group.all_reduce_grads = value;
    } else if (call.method == "set_requires_all_reduce") {
      group.all_reduce_grads = value;
    } else if (call.method == "set_reshard_after_backward") {
      group.reshard_after_backward = value;
    } else if (call.method == "set_reshard_after_forward") {
      group.post_forward_size = value ? partition_.shard_size : 0;
    } else if (call.method == "set_unshard_in_backward") {
      if (target == unit) group.unshard_in_backward = value;  // not recursive
    } else {
      return MakeInputError("", "fsdp2 does not know this call", call.method);
    }
  }
  return {};
}

Status Fsdp2Policy::UserCall(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  const ModuleCall& call = *event.call;
  builder_.SetReason("user");
  if (call.method == "unshard") {
    // unshard(async_op) waits only when it is synchronous. Outside a hook the group's state is idle, so the
    // current stream is used.
    if (event.unit < 0 || !groups_[event.unit].has_parameters) return {};
    Unshard(event.unit, call.value.value_or(false), "user");
    if (!call.value.value_or(false)) WaitForUnshard(event.unit);
    return {};
  }
  if (call.method == "reshard") {
    if (event.unit >= 0 && groups_[event.unit].has_parameters) Reshard(event.unit);
    return {};
  }
  return Setter(call);
}

Status Fsdp2Policy::On(const HostEvent& event) {
  switch (event.kind) {
    case HostEventKind::kSegment:
      OnSegment(event);
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
    case HostEventKind::kInputsGradDone:
      PostBackwardFromAutograd(event);
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
    case HostEventKind::kBackwardBegin:
      backward_unit_ = -1;
      break;
    case HostEventKind::kForwardBegin:
    case HostEventKind::kForwardEnd:
    case HostEventKind::kParameterGradsDone:
      break;
  }
  return {};
}

void Fsdp2Policy::OnSegment(const HostEvent& event) {
  std::vector<ParameterId> accumulating;
  std::vector<UnitId> reads;
  if (event.range.backward) {
    const Pass& pass = trace_.backwards[event.range.pass];
    if (backward_unit_ >= 0 && groups_[backward_unit_].sharded == ShardedState::kUnsharded) {
      reads.push_back(backward_unit_);
    }
    for (std::int32_t i = event.range.begin; i < event.range.end; ++i) {
      const auto* grad = std::get_if<ParameterGradEvent>(&pass.events[i]);
      if (grad == nullptr) continue;
      const UnitParameterRef owner = OwnerOf(partition_, grad->parameter, -1);
      if (owner.unit < 0) continue;
      if (!groups_[owner.unit].grads.insert(owner.parameter).second) accumulating.push_back(grad->parameter);
    }
    std::sort(accumulating.begin(), accumulating.end());
  }
  builder_.Compute(event, accumulating, reads);
}

void Fsdp2Policy::PreForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPreForward, unit, event.microbatch);
  if (group.state_training == TrainingState::kPreBackward) {
    // Inside a recomputation that this unit's own pre-backward is responsible for.
    if (group.has_parameters && group.sharded != ShardedState::kUnsharded) {
      Unshard(unit, false, "recompute");
      WaitForUnshard(unit);
    }
    return;
  }
  group.state_training = TrainingState::kForward;
  const bool recompute = event.kind == HostEventKind::kRecomputePreForward;
  builder_.SetReason(recompute ? "recompute" : "pre_forward");
  if (iter_forward_root_ < 0) {
    // Root pre-forward: all-gathers wait for the optimizer.
    iter_forward_root_ = unit;
    builder_.WaitStream(copy_in_stream_, kCompute, "forward_begin");
    builder_.Wait(builder_.Event("forward_begin"), all_gather_stream_);
  }
  if (group.has_parameters) {
    group.training = TrainingState::kForward;
    Unshard(unit, unshard_async_op_, recompute ? "recompute" : "pre_forward");
    WaitForUnshard(unit);
  }
  for (const UnitId target : group.forward_prefetch) {
    Prefetch(target, TrainingState::kForward, "prefetch_forward");
  }
}

void Fsdp2Policy::PostForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPostForward, unit, event.microbatch);
  builder_.SetReason("post_forward");
  if (group.state_training == TrainingState::kPreBackward) return;
  if (group.has_parameters) {
    if (event.kind == HostEventKind::kPostForward) {  // not in a backward
      Reshard(unit);
      group.post_forward_indices.push_back(static_cast<std::int32_t>(comm_.post_forward_order.size()));
      comm_.post_forward_order.push_back(unit);
    }
    group.training = TrainingState::kIdle;
  }
  group.state_training = TrainingState::kIdle;
  if (iter_forward_root_ != unit) return;
  if (comm_.all_gather_state >= 0) {
    WaitAllGatherStreams(builder_.Event(EventName(comm_.all_gather_state, "copy_out")));
    builder_.SetUnit(-1);
    builder_.Free(comm_.all_gather_output, copy_in_stream_);
    comm_.all_gather_state = -1;
  }
  iter_forward_root_ = -1;
}

void Fsdp2Policy::PreBackward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPreBackward, unit, event.microbatch);
  backward_unit_ = unit;
  group.state_training = TrainingState::kPreBackward;
  final_callback_queued_ = true;
  if (group.has_parameters && group.training != TrainingState::kPreBackward) {
    builder_.SetReason("pre_backward");
    group.training = TrainingState::kPreBackward;
    Unshard(unit, unshard_async_op_, "pre_backward");
    builder_.SetReason("pre_backward");
    WaitForUnshard(unit);
    if (group.backward_prefetch.empty() && group.default_backward_prefetch) BackwardPrefetch(unit);
  }
  for (const UnitId target : group.backward_prefetch) {
    Prefetch(target, TrainingState::kPreBackward, "prefetch_backward_explicit");
  }
}

// Implicit backward prefetch: the unit before this one in the order of post-forwards.
void Fsdp2Policy::BackwardPrefetch(UnitId unit) {
  std::vector<std::int32_t>& indices = groups_[unit].post_forward_indices;
  if (indices.empty()) return;
  const std::int32_t target = indices.back() - 1;
  indices.pop_back();
  if (target < 0) return;
  Prefetch(comm_.post_forward_order[target], TrainingState::kPreBackward, "prefetch_backward");
}

void Fsdp2Policy::Prefetch(UnitId target, TrainingState as, std::string_view reason) {
  Group& group = groups_[target];
  if (!group.has_parameters) return;
  const TrainingState before = group.training;
  group.training = as;
  Unshard(target, unshard_async_op_, reason);
  group.training = before;
}

void Fsdp2Policy::PostBackwardFromAutograd(const HostEvent& event) {
  if (!groups_[event.unit].has_parameters) return;
  builder_.BeginTrigger(TriggerKind::kPostBackward, event.unit, event.microbatch);
  PostBackward(event.unit, "autograd");
}

void Fsdp2Policy::FinalCallback(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  backward_unit_ = -1;
  if (!final_callback_queued_) return;
  for (const UnitId unit : partition_.states) {
    Group& group = groups_[unit];
    builder_.SetUnit(unit);
    if (group.has_parameters && group.training != TrainingState::kPostBackward) PostBackward(unit, "final");
    group.state_training = group.training = TrainingState::kIdle;
    builder_.SetReason("finalize");
    if (is_last_backward_ && group.has_parameters) FinalizeBackward(unit);
  }
  builder_.SetUnit(-1);
  if (is_last_backward_) {
    comm_.post_forward_order.clear();
    if (comm_.reduce_scatter_unit >= 0) {
      builder_.Wait(builder_.Event(EventName(comm_.reduce_scatter_unit, "reduce_scatter")), kCompute);
      builder_.Free(comm_.reduce_scatter_input, kCompute);
      comm_.reduce_scatter_unit = -1;
    }
  }
  final_callback_queued_ = false;
}

void Fsdp2Policy::OptimizerStep(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  std::vector<UnitId> units;
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    if (groups_[u].has_sharded_grad) units.push_back(static_cast<UnitId>(u));
  }
  optimizer_.Step(units);
}

void Fsdp2Policy::ZeroGrad(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  builder_.SetReason("user");
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  for (Group& group : groups_) group.has_sharded_grad = false;
}

std::string Fsdp2Policy::State() const {
  std::string state = fmt::format("{} {} {} {} {} {} {}|", iter_forward_root_, final_callback_queued_,
                                  is_last_backward_, comm_.all_gather_state, comm_.reduce_scatter_unit,
                                  force_sum_reduction_, ListState(comm_.post_forward_order));
  for (const Group& g : groups_) {
    state +=
        fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {}{}{}{}{} {};", static_cast<int>(g.state_training),
                    static_cast<int>(g.training), static_cast<int>(g.sharded), g.pending.has_value(),
                    g.pending ? g.pending->async : false, ListState(g.post_forward_indices),
                    g.reshard_after_forward_recorded, g.post_reduce_event, g.all_reduce.has_value(),
                    g.partial_reduce_output, g.post_forward_shard,
                    ListState(g.grads) + ListState(g.accumulated), g.has_sharded_grad, g.reduce_grads,
                    g.all_reduce_grads, g.reshard_after_backward, g.unshard_in_backward, g.post_forward_size);
  }
  return state + optimizer_.State();
}

std::string Fsdp2Policy::EventName(UnitId unit, std::string_view what) const {
  return fmt::format("{}.{}", DisplayName(UnitOf(unit).fqn), what);
}

MemoryKind Fsdp2Policy::ShardMemory(UnitId unit) const {
  if (!groups_[unit].offloads) return MemoryKind::kDevice;
  return strategy_.pin_memory ? MemoryKind::kPinnedHost : MemoryKind::kHost;
}

std::int64_t Fsdp2Policy::ShardRanks(UnitId unit) const {
  return UnitOf(unit).shard_communicator < 0 ? 1 : partition_.shard_size;
}

}  // namespace shardplan
