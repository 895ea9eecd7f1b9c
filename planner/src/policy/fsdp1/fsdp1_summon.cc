// FullyShardedDataParallel.summon_full_params (_unshard_param_utils.py).
#include <fmt/format.h>

#include <algorithm>

#include "policy/fsdp1/fsdp1_policy.h"

namespace shardplan {
namespace {

bool IsUnder(const std::string& fqn, const std::string& module) {
  return module.empty() || fqn == module || fqn.starts_with(module + ".");
}

}  // namespace

std::vector<UnitId> Fsdp1Policy::UnitsUnder(const ModuleCall& call) const {
  std::vector<UnitId> units;
  for (const UnitId unit : partition_.states) {
    const std::string& fqn = UnitOf(unit).fqn;
    if (call.recurse ? IsUnder(fqn, call.module) : fqn == call.module) units.push_back(unit);
  }
  return units;
}

// _validate_unshard_params_args. Flags are the arguments that are not at their defaults: `writeback` is true
// by default, the others are false.
Status Fsdp1Policy::CheckSummonFlags(const ModuleCall& call, const std::vector<UnitId>& units) const {
  constexpr std::string_view kFlags[] = {"with_grads", "offload_to_cpu", "rank0_only", "writeback"};
  for (const std::string& flag : call.flags) {
    if (std::ranges::find(kFlags, flag) == std::end(kFlags)) {
      return MakeInputError("/program", "summon_full_params does not know this flag", flag,
                            "with_grads, offload_to_cpu, rank0_only or writeback");
    }
  }
  const auto has = [&](std::string_view flag) {
    return std::ranges::find(call.flags, flag) != call.flags.end();
  };
  const auto refuse = [](const char* why) {
    return MakeInputError("/program", std::string("FSDP1 refuses ") + why);
  };
  if (has("with_grads") && (has("offload_to_cpu") || !strategy_.fsdp1.use_orig_params)) {
    return refuse("summon_full_params(with_grads) with offload_to_cpu, or without use_orig_params");
  }
  if (has("rank0_only") && !has("writeback")) {
    return refuse("summon_full_params(rank0_only) with writeback, the default: name the flag writeback, too");
  }
  for (const UnitId id : units) {
    const Handle& handle = handles_[id];
    if (has("offload_to_cpu") && handle.exists && !handle.sharded) {
      return refuse("summon_full_params(offload_to_cpu) of parameters that are not sharded");
    }
    if (has("with_grads") && handle.sharded && (handle.has_flat_grad || handle.offloads)) {
      return refuse("summon_full_params(with_grads) of gradients that are not reduced, or on the host");
    }
  }
  return {};
}

// Enters the context (value true) or leaves it. Unit by unit the host waits for the device; the parameters
// are gathered in the original dtype, on the compute stream, and freed by those that they were gathered by.
// With rank0_only the other ranks free them at once; the plan is rank 0's. (What the user changed is written
// back to this rank's shard: a copy on the device that is no instruction.)
Status Fsdp1Policy::SummonFullParams(const HostEvent& event) {
  const ModuleCall& call = *event.call;
  if (!initialized_ && !call.module.empty()) {
    return MakeInputError(
        "/program",
        "a module whose parameters are summoned before the model has run is taken for a root "
        "of its own, and the model's first forward fails",
        call.module, "the root first, or a forward");
  }
  const bool enters = call.value.value_or(true);
  std::vector<UnitId> units = UnitsUnder(call);
  if (Status s = CheckSummonFlags(call, units); !s) return s;
  if (!enters) std::ranges::reverse(units);
  const StreamId unshard_stream = unshard_stream_, pre_unshard_stream = pre_unshard_stream_;
  builder_.SetReason("summon_full_params");
  if (enters) DropZeroedGrads();
  for (const UnitId id : units) {
    Handle& handle = handles_[id];
    builder_.SetUnit(id);
    if (enters) Synchronize();
    if (!handle.exists) continue;
    if (enters == handle.summoned) {
      return MakeInputError("/program", "summon_full_params is entered twice, or left before it is entered",
                            DisplayName(UnitOf(id).fqn));
    }
    unshard_stream_ = pre_unshard_stream_ = kCompute;
    summoning_ = true;
    if (enters) {
      Summon(id, call.flags);
    } else {
      EndSummon(id);
    }
    handle.summoned = enters;
    summoning_ = false;
    unshard_stream_ = unshard_stream;
    pre_unshard_stream_ = pre_unshard_stream;
  }
  return {};
}

void Fsdp1Policy::Summon(UnitId id, const std::vector<std::string>& flags) {
  Handle& handle = handles_[id];
  Copy& copy = handle.casts_params ? handle.full : handle.unsharded;
  handle.summon_frees = handle.sharded && !copy.allocated;
  Unshard(id, "summon_full_params");
  if (std::ranges::find(flags, "with_grads") != flags.end() && handle.sharded) SummonGrad(id);
  if (std::ranges::find(flags, "offload_to_cpu") == flags.end()) return;
  handle.summoned_host.buffer = FlatBuffer(id, BufferRole::kParamUnsharded, UnitOf(id).orig_dtype,
                                           handle.numel, "host", MemoryKind::kHost);
  AllocateOn(handle.summoned_host, kHost);
  builder_.Move(InstructionKind::kCopyToHost, copy.buffer, handle.summoned_host.buffer, kCompute);
  WaitForHost(EventName(id, "summoned"));
  builder_.Emit(InstructionKind::kBindUnsharded, -1).src = handle.summoned_host.buffer;
  FreeCopy(copy, kCompute);
}

void Fsdp1Policy::EndSummon(UnitId id) {
  Handle& handle = handles_[id];
  if (handle.summoned_host.allocated) {
    Copy& copy = handle.casts_params ? handle.full : handle.unsharded;
    AllocateOn(copy, kCompute);
    builder_.Move(InstructionKind::kCopyToDevice, handle.summoned_host.buffer, copy.buffer, kCompute);
    WaitForHost(EventName(id, "summoned"));
    builder_.Emit(InstructionKind::kBindUnsharded, -1).src = copy.buffer;
    FreeCopy(handle.summoned_host, kHost);
  }
  Reshard(id, handle.summon_frees);
  FreeCopy(handle.summoned_grad, kCompute);
}

// FlatParamHandle.unshard_grad: the ranks count those without a gradient, and gather it unless all are.
void Fsdp1Policy::SummonGrad(UnitId id) {
  Handle& handle = handles_[id];
  const CommunicatorId group = UnitOf(id).shard_communicator;
  const BufferId count = builder_.AddBuffer({.name = "summon_full_params.without_gradient",
                                             .role = BufferRole::kOrderCheck,
                                             .dtype = DType::kInt32,
                                             .parts_bytes = {Bytes{SizeBytes(DType::kInt32)}}});
  const BufferId own = builder_.AddBuffer({.name = "summon_full_params.own",
                                           .role = BufferRole::kOrderCheck,
                                           .dtype = DType::kInt32,
                                           .parts_bytes = {Bytes{SizeBytes(DType::kInt32)}},
                                           .memory = MemoryKind::kHost,
                                           .persistent = true});
  builder_.Allocate(count, kCompute);
  builder_.Move(InstructionKind::kCopyToDevice, own, count, kCompute);
  Instruction& reduce = builder_.Emit(InstructionKind::kAllReduce, kCompute);
  reduce.src = count;
  reduce.communicator = group;
  WaitForHost("summon_full_params.counted");
  if (handle.has_sharded_grad) {
    const BufferId grad = handle.has_low_grad
                              ? FlatBuffer(id, BufferRole::kGradSharded, UnitOf(id).param_dtype,
                                           UnitOf(id).flat_numel / handle.ranks, "low_precision")
                              : ReducedGrad(id);
    handle.summoned_grad.buffer =
        FlatBuffer(id, BufferRole::kGradUnshardedAccumulated, builder_.plan().buffers[grad].dtype,
                   UnitOf(id).flat_numel, "summoned");
    AllocateOn(handle.summoned_grad, kCompute);
    builder_.Move(InstructionKind::kAllGather, grad, handle.summoned_grad.buffer, kCompute).communicator =
        group;
  }
  builder_.Free(count, kCompute);
}

void Fsdp1Policy::WaitForHost(const std::string& event) {
  builder_.Record(builder_.Event(event), kCompute);
  builder_.HostWait(builder_.Event(event));
}

// torch.cuda.synchronize()
void Fsdp1Policy::Synchronize() {
  const auto streams = static_cast<StreamId>(builder_.plan().streams.size());
  for (StreamId stream = 0; stream < streams; ++stream) {
    const EventId event = builder_.Event(fmt::format("synchronize.{}", builder_.plan().streams[stream].name));
    builder_.Record(event, stream);
    builder_.HostWait(event);
  }
}

}  // namespace shardplan
