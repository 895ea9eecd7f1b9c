// The hooks of FSDPState (_fsdp_state.py).
#include "policy/fsdp2/fsdp2_policy.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardplan {
namespace {

std::string ListState(const auto& list) { return fmt::format("[{}]", fmt::join(list, ",")); }

std::string GradState(const std::set<std::int32_t>& grads, const std::set<std::int32_t>& accumulated,
                      const std::map<std::int32_t, BufferId>& sharded) {
  std::string state = ListState(grads) + "+" + ListState(accumulated);
  for (const auto& [parameter, buffer] : sharded) state += fmt::format(" {}:{}", parameter, buffer);
  return state;
}

}  // namespace

Fsdp2Policy::Fsdp2Policy(const PolicyInput& input, ProgramBuilder& builder)
    : trace_(input.trace),
      index_(input.index),
      partition_(input.partition),
      strategy_(input.strategy),
      steps_(input.steps),
      builder_(builder),
      optimizer_(input.strategy, input.partition, builder) {}

std::unique_ptr<Policy> MakeFsdp2Policy(const PolicyInput& input, ProgramBuilder& builder) {
  return std::make_unique<Fsdp2Policy>(input, builder);
}

Status Fsdp2Policy::SetUp() {
  builder_.Stream("compute");
  MakeGroups();
  if (Status s = optimizer_.Check(); !s) return s;
  if (Status s = ShareCommContexts(); !s) return s;
  SetPrefetchDistances();
  const Fsdp2Knobs& knobs = strategy_.fsdp2;
  if (Status s = SetPrefetchLists(knobs.forward_prefetch_lists, "/fsdp2/forward_prefetch_lists", true); !s) {
    return s;
  }
  if (Status s = SetPrefetchLists(knobs.backward_prefetch_lists, "/fsdp2/backward_prefetch_lists", false);
      !s) {
    return s;
  }
  for (std::size_t c = 0; c < strategy_.setup.size(); ++c) {
    if (Status s = Setter(strategy_.setup[c], /*in_setup=*/true); !s) {
      return MakeInputError(fmt::format("/setup/{}", c), s.error().message, s.error().found,
                            s.error().expected);
    }
  }
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    builder_.plan().units[u].gradient_divide_factor = groups_[u].gradient_divide_factor;
  }
  // Where the model's root is the first to be called, its first forward is like every other.
  const UnitId first = FirstCalled();
  return first >= 0 && partition_.units[first].is_root ? LazyInit(first) : Status{};
}

// The unit of the program's first forward or user call.
UnitId Fsdp2Policy::FirstCalled() const {
  for (const RecordedStep& step : steps_) {
    for (const HostEvent& event : step.events) {
      if (event.kind == HostEventKind::kModuleCall) return -1;
      if (event.kind == HostEventKind::kPreForward) return event.unit;
    }
  }
  return -1;
}

Status Fsdp2Policy::On(const HostEvent& event) {
  switch (event.kind) {
    case HostEventKind::kSegment:
      OnSegment(event);
      break;
    case HostEventKind::kPreForward:
    case HostEventKind::kRecomputePreForward:
      return PreForward(event);
    case HostEventKind::kPostForward:
    case HostEventKind::kRecomputePostForward:
      PostForward(event);
      break;
    case HostEventKind::kPreBackward:
      return PreBackward(event);
    case HostEventKind::kInputsGradDone:
      return PostBackwardFromAutograd(event);
    case HostEventKind::kBackwardEnd:
      return BackwardEnd(event);
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
    default:  // points that only other policies act on
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

Status Fsdp2Policy::PreForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPreForward, unit, event.microbatch);
  if (group.state_training == TrainingState::kPreBackward) {
    // Inside a recomputation that this unit's own pre-backward is responsible for.
    if (group.has_parameters && group.sharded != ShardedState::kUnsharded) {
      Unshard(unit, false, "recompute");
      WaitForUnshard(unit);
    }
    return {};
  }
  group.state_training = TrainingState::kForward;
  const bool recompute = event.kind == HostEventKind::kRecomputePreForward;
  builder_.SetReason(recompute ? "recompute" : "pre_forward");
  if (!lazily_initialised_[unit]) {
    if (Status s = LazyInit(unit); !s) return s;
  }
  RootPreForward(unit);
  if (group.has_parameters) {
    group.training = TrainingState::kForward;
    group.forward_open = !recompute;
    Unshard(unit, group.unshard_async_op, recompute ? "recompute" : "pre_forward");
    WaitForUnshard(unit);
  }
  for (const UnitId target : group.forward_prefetch) {
    if (Status s = Prefetch(unit, target, TrainingState::kForward, "prefetch_forward"); !s) return s;
  }
  return {};
}

void Fsdp2Policy::PostForward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPostForward, unit, event.microbatch);
  builder_.SetReason("post_forward");
  if (group.state_training == TrainingState::kPreBackward) return;
  CommContext& comm = Comm(unit);
  if (group.has_parameters) {
    group.forward_open = false;
    if (event.kind == HostEventKind::kPostForward) {  // not in a backward
      Reshard(unit);
      group.post_forward_indices.push_back(static_cast<std::int32_t>(comm.post_forward_order.size()));
      comm.post_forward_order.push_back(unit);
    }
    group.training = TrainingState::kIdle;
  }
  group.state_training = TrainingState::kIdle;
  if (Context(unit).iter_forward_root != unit) return;
  if (comm.all_gather_unit >= 0) {
    WaitAllGatherStreams(comm, builder_.Event(EventName(comm.all_gather_unit, "copy_out")));
    builder_.SetUnit(-1);
    DropKeptOutput(comm);
  }
  Context(unit).iter_forward_root = -1;
}

Status Fsdp2Policy::PreBackward(const HostEvent& event) {
  const UnitId unit = event.unit;
  Group& group = groups_[unit];
  builder_.BeginTrigger(TriggerKind::kPreBackward, unit, event.microbatch);
  backward_unit_ = unit;
  group.state_training = TrainingState::kPreBackward;
  if (!Context(unit).final_callback_queued) {
    Context(unit).final_callback_queued = true;
    final_callbacks_.emplace_back(context_of_[unit], comm_of_[unit]);
  }
  if (group.has_parameters && group.training != TrainingState::kPreBackward) {
    builder_.SetReason("pre_backward");
    group.training = TrainingState::kPreBackward;
    Unshard(unit, group.unshard_async_op, "pre_backward");
    builder_.SetReason("pre_backward");
    WaitForUnshard(unit);
    if (group.backward_prefetch.empty() && group.default_backward_prefetch) {
      if (Status s = BackwardPrefetch(unit); !s) return s;
    }
  }
  for (const UnitId target : group.backward_prefetch) {
    if (Status s = Prefetch(unit, target, TrainingState::kPreBackward, "prefetch_backward_explicit"); !s) {
      return s;
    }
  }
  return {};
}

// Implicit backward prefetch: the unit before this one in the order of post-forwards.
Status Fsdp2Policy::BackwardPrefetch(UnitId unit) {
  const std::vector<UnitId>& order = Comm(unit).post_forward_order;
  std::vector<std::int32_t>& indices = groups_[unit].post_forward_indices;
  if (indices.empty()) return {};
  const std::int32_t target = indices.back() - 1;
  indices.pop_back();
  if (target < 0) return {};
  if (target >= std::ssize(order)) {
    return MakeInputError(
        "/fsdp2/shared_comm_contexts",
        "PyTorch fails here (IndexError): the first forward of another root has emptied the "
        "order that the backward prefetch looks into",
        DisplayName(UnitOf(unit).fqn));
  }
  return Prefetch(unit, order[target], TrainingState::kPreBackward, "prefetch_backward");
}

Status Fsdp2Policy::Prefetch(UnitId unit, UnitId target, TrainingState as, std::string_view reason) {
  Group& group = groups_[target];
  if (!group.has_parameters) return {};
  const bool gathers = ShardRanks(target) > 1 && !group.pending && group.sharded != ShardedState::kUnsharded;
  if (gathers && !lazily_initialised_[target]) {
    return MakeInputError(
        "/fsdp2",
        "PyTorch fails here (AttributeError): a unit is prefetched before the first forward of "
        "its own root",
        fmt::format("{} prefetches {}", DisplayName(UnitOf(unit).fqn), DisplayName(UnitOf(target).fqn)));
  }
  if (comm_of_[unit] != comm_of_[target]) {
    AddFault(
        Rule::kReadBeforeWrite,
        "a unit of another root is prefetched on that root's streams, which wait for the optimizer only in "
        "its own pre-forward");
  }
  const TrainingState before = group.training;
  group.training = as;
  Unshard(target, group.unshard_async_op, reason);
  group.training = before;
  return {};
}

Status Fsdp2Policy::PostBackwardFromAutograd(const HostEvent& event) {
  if (!groups_[event.unit].has_parameters) return {};
  builder_.BeginTrigger(TriggerKind::kPostBackward, event.unit, event.microbatch);
  return PostBackward(event.unit, "autograd");
}

// The engine runs the callbacks that roots have queued, in that order.
Status Fsdp2Policy::BackwardEnd(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kBackwardEnd, -1, event.microbatch);
  backward_unit_ = -1;
  for (const auto& [context, comm] : final_callbacks_) {
    if (Status s = FinalCallback(contexts_[context], comms_[comm]); !s) return s;
  }
  final_callbacks_.clear();
  return {};
}

Status Fsdp2Policy::FinalCallback(StateContext& context, CommContext& comm) {
  for (const UnitId unit : context.states) {
    Group& group = groups_[unit];
    builder_.SetUnit(unit);
    if (group.has_parameters && group.training != TrainingState::kPostBackward) {
      if (Status s = PostBackward(unit, "final"); !s) return s;
    }
    group.state_training = group.training = TrainingState::kIdle;
    if (group.forward_open && !context.is_last_backward && partition_.units[unit].modules.size() > 1) {
      AddFault(
          Rule::kUseBeforeUnshard,
          "a module of a group has not run in its last forward, and before the last backward nothing makes "
          "the group's hooks forget it: PyTorch does not unshard the group in the next forward, and fails");
    }
    group.forward_open = false;
    builder_.SetReason("finalize");
    if (context.is_last_backward && group.has_parameters) FinalizeBackward(unit);
  }
  builder_.SetUnit(-1);
  if (context.is_last_backward) {
    comm.post_forward_order.clear();
    WaitReduceScatter(comm, 0);
  }
  context.final_callback_queued = false;
  return {};
}

void Fsdp2Policy::OptimizerStep(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kOptimizerStep, -1, event.microbatch);
  std::vector<SteppedUnit> units;
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    if (groups_[u].sharded_grads.empty()) continue;
    units.push_back({.unit = static_cast<UnitId>(u)});
    for (const auto& [parameter, grad] : groups_[u].sharded_grads)
      units.back().parameters.push_back(parameter);
  }
  optimizer_.Step(units);
  if (!strategy_.fsdp2.post_optim_event) return;
  // The user's own event: unrelated work after the optimizer does not hold up the first all-gather.
  builder_.SetReason("post_optim_event");
  const EventId optimized = builder_.Event("post_optim");
  builder_.Record(optimized, kCompute);
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    if (context_of_[u] == u && lazily_initialised_[u]) contexts_[u].post_optim_event = optimized;
  }
}

void Fsdp2Policy::ZeroGrad(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kZeroGrad, -1, event.microbatch);
  builder_.SetReason("user");
  builder_.Emit(InstructionKind::kZeroGrad, -1);
  for (Group& group : groups_) group.sharded_grads.clear();
}

std::unique_ptr<PolicyState> Fsdp2Policy::State() const {
  std::string state;
  for (std::size_t u = 0; u < groups_.size(); ++u) {
    if (context_of_[u] == u) {
      const StateContext& context = contexts_[u];
      state += fmt::format("{} {} {} {}|", context.iter_forward_root, context.final_callback_queued,
                           context.is_last_backward, context.post_optim_event);
    }
    const CommContext& comm = comms_[u];
    state +=
        fmt::format("{} {} {}", comm.generation, comm.all_gather_unit, ListState(comm.post_forward_order));
    for (const PendingReduce& pending : comm.reduce_scatters) state += fmt::format(" {}", pending.input);
    const Group& g = groups_[u];
    state += fmt::format(
        ":{} {} {} {} {} {} {} {} {} {} {} {} {}{}{}{}{}{}{}{} {} {};", static_cast<int>(g.state_training),
        static_cast<int>(g.training), static_cast<int>(g.sharded), g.pending.has_value(),
        g.pending ? g.pending->async : false, ListState(g.post_forward_indices),
        g.reshard_after_forward_recorded, g.post_reduce_event, g.all_reduce.has_value(),
        g.partial_reduce_output, ListState(g.post_forward_shards),
        GradState(g.grads, g.accumulated, g.sharded_grads), g.sharded_grads.size(), g.reduce_grads,
        g.all_reduce_grads, g.reshard_after_backward, g.unshard_in_backward, g.force_sum_reduction,
        g.separate_reduce_scatter, g.process_group_memory, g.reduce_scatters_in_flight, g.post_forward_size);
    state += ListState(g.forward_prefetch) + ListState(g.backward_prefetch);
  }
  return std::make_unique<PolicyStateOf<std::pair<std::string, OptimizerMemory::State>>>(
      std::pair{std::move(state), optimizer_.state()});
}

std::string Fsdp2Policy::EventName(UnitId unit, std::string_view what) const {
  return fmt::format("{}.{}", DisplayName(UnitOf(unit).fqn), what);
}

MemoryKind Fsdp2Policy::ShardMemory(UnitId unit) const {
  if (!groups_[unit].offloads) return MemoryKind::kDevice;
  return strategy_.pin_memory ? MemoryKind::kPinnedHost : MemoryKind::kHost;
}

// A staging buffer of a collective: from the process group's own memory pool when that is asked for.
BufferId Fsdp2Policy::CommBuffer(UnitId unit, BufferRole role, DType dtype, Bytes bytes,
                                 std::vector<std::int32_t> parameters, std::string_view suffix) {
  const CommunicatorId pool = groups_[unit].process_group_memory ? UnitOf(unit).shard_communicator : -1;
  return builder_.UnitBuffer(unit, role, dtype, {bytes}, std::move(parameters), suffix, MemoryKind::kDevice,
                             pool);
}

void Fsdp2Policy::AddFault(Rule rule, std::string why) {
  const bool known = std::ranges::any_of(
      faults_, [&](const KnownFault& fault) { return fault.rule == rule && fault.why == why; });
  if (!known) faults_.push_back({rule, std::move(why)});
}

}  // namespace shardplan
