// Flat parameters: unshard, reshard, prefetch (_runtime_utils.py, _flat_param.py, _limiter_utils.py,
// _exec_order_utils.py).
#include <fmt/format.h>

#include <algorithm>

#include "policy/fsdp1/fsdp1_policy.h"
#include "units/layout.h"

namespace shardplan {
namespace {

// _FreeEventQueue._max_num_inflight_all_gathers
constexpr std::size_t kMaxInflightAllGathers = 2;

}  // namespace

void Fsdp1Policy::AllocateOn(Copy& copy, StreamId stream) {
  if (copy.allocated) return;
  builder_.Allocate(copy.buffer, stream);
  copy.allocated = true;
}

void Fsdp1Policy::FreeCopy(Copy& copy, StreamId stream, std::vector<StreamId> safe_after) {
  if (!copy.allocated) return;
  builder_.Free(copy.buffer, stream, std::move(safe_after));
  copy.allocated = false;
}

void Fsdp1Policy::Unshard(UnitId id, std::string_view reason) {
  Handle& handle = handles_[id];
  const UnitId caller = builder_.unit();
  const std::string caller_reason = builder_.reason();
  builder_.SetUnit(id);
  builder_.SetReason(reason);
  const bool full = handle.casts_params && ForcesFullPrecision();
  // Parameters gathered in full precision may be changed: a low-precision copy would be out of date.
  if (full && handle.sharded) FreeCopy(handle.unsharded, unshard_stream_);
  Copy& unsharded = full ? handle.full : handle.unsharded;
  const bool gathers = handle.sharded && !unsharded.allocated;
  const BufferId shard = PreUnshard(id, gathers, full);
  if (strategy_.fsdp1.limit_all_gathers && free_events_.size() >= kMaxInflightAllGathers) {
    builder_.HostWait(free_events_.front());
    free_events_.pop_front();
  }
  if (gathers) {
    AllocateOn(unsharded, unshard_stream_);
    builder_.Move(InstructionKind::kAllGather, shard, unsharded.buffer, unshard_stream_).communicator =
        UnitOf(id).shard_communicator;
  }
  const BufferId bound = handle.sharded ? unsharded.buffer : shard;
  builder_.Emit(InstructionKind::kBindUnsharded, -1).src = bound;
  if (bound != handle.param_sharded) {
    handle.points_to_shard = false;
    handle.on_device = true;
  }
  if (handle.sharded) {
    std::vector<StreamId> used_on;
    if (gathers) used_on.push_back(unshard_stream_);
    FreeCopy(handle.low_precision, pre_unshard_stream_, {unshard_stream_});
    FreeCopy(handle.device_shard, pre_unshard_stream_, used_on);
  }
  builder_.SetUnit(caller);
  builder_.SetReason(caller_reason);
}

// FlatParamHandle.pre_unshard: brings an offloaded shard to the device and casts it. The buffer to gather, or
// for NO_SHARD to use. An offloaded shard is brought even when nothing is to be gathered.
BufferId Fsdp1Policy::PreUnshard(UnitId id, bool gathers, bool full) {
  Handle& handle = handles_[id];
  if (handle.sharded && !handle.offloads && !gathers) return handle.param_sharded;
  const bool casts = handle.casts_params && !full;
  const bool copies = handle.offloads && (casts || !handle.on_device);
  if (!casts && !copies) return handle.param_sharded;
  if (casts) AllocateOn(handle.low_precision, pre_unshard_stream_);
  if (copies) {
    const BufferRole role =
        handle.sharded || casts ? BufferRole::kAllGatherInput : BufferRole::kParamUnsharded;
    handle.device_shard.buffer =
        FlatBuffer(id, role, UnitOf(id).orig_dtype, UnitOf(id).flat_numel / handle.ranks, "device");
    AllocateOn(handle.device_shard, pre_unshard_stream_);
    builder_.Move(InstructionKind::kCopyToDevice, handle.param_sharded, handle.device_shard.buffer,
                  pre_unshard_stream_);
  }
  if (casts) {
    builder_.Move(InstructionKind::kCopyIn, copies ? handle.device_shard.buffer : handle.param_sharded,
                  handle.low_precision.buffer, pre_unshard_stream_);
    FreeCopy(handle.device_shard, pre_unshard_stream_);
  }
  builder_.WaitStream(unshard_stream_, pre_unshard_stream_, EventName(id, "pre_unshard"));
  return casts ? handle.low_precision.buffer : handle.device_shard.buffer;
}

void Fsdp1Policy::WaitForUnshard(UnitId id) {
  builder_.WaitStream(kCompute, unshard_stream_, EventName(id, "unshard"));
}

void Fsdp1Policy::Reshard(UnitId id, bool free, bool grad_enabled) {
  Handle& handle = handles_[id];
  builder_.Emit(InstructionKind::kBindSharded, -1).src = handle.param_sharded;
  handle.skipped_sharded_views = strategy_.fsdp1.use_orig_params && grad_enabled && handle.sharded &&
                                 handle.training == TrainingState::kForward && !handle.reshards_after_forward;
  handle.points_to_shard = true;
  handle.on_device = false;
  if (free) {
    // What is freed depends on the mode now, not on what was gathered.
    const bool full = handle.casts_params && ForcesFullPrecision();
    FreeCopy(handle.unsharded, unshard_stream_, {kCompute});
    if (full) FreeCopy(handle.full, unshard_stream_, {kCompute});
  }
  if (free && strategy_.fsdp1.limit_all_gathers) {
    std::string name = fmt::format("free.{}", frees_in_step_++);
    while (std::find(free_events_.begin(), free_events_.end(), builder_.Event(name)) != free_events_.end()) {
      name += ".again";
    }
    free_events_.push_back(builder_.Event(name));
    builder_.Record(free_events_.back(), kCompute);
  }
  if (!handle.sharded) {  // what the modules used
    FreeCopy(handle.low_precision, pre_unshard_stream_, {kCompute});
    FreeCopy(handle.device_shard, pre_unshard_stream_, {kCompute});
  }
  handle.prefetched = false;
}

void Fsdp1Policy::PostBackwardReshard(UnitId id) {
  Reshard(id, FreesInBackward(handles_[id]));
  Prefetch(id, /*forward=*/false);
}

UnitId Fsdp1Policy::PrefetchTarget(UnitId current) const {
  const Handle& handle = handles_[current];
  const bool now = (handle.training == TrainingState::kBackwardPre &&
                    handle.backward_prefetch == Fsdp1BackwardPrefetch::kPre) ||
                   (handle.training == TrainingState::kBackwardPost &&
                    handle.backward_prefetch == Fsdp1BackwardPrefetch::kPost);
  if (now) {
    if (!handle.post_forward_index || *handle.post_forward_index == 0) return -1;
    const UnitId target = post_forward_order_[*handle.post_forward_index - 1];
    return handles_[target].needs_pre_backward_unshard && !handles_[target].prefetched ? target : -1;
  }
  if (handle.training != TrainingState::kForward || !handle.forward_prefetch) return -1;
  if (!handle.pre_forward_index) return -1;
  const std::size_t index = *handle.pre_forward_index + 1;
  if (index >= pre_forward_order_.size()) return -1;
  const UnitId target = pre_forward_order_[index];
  return handles_[target].needs_pre_forward_unshard && !handles_[target].prefetched ? target : -1;
}

UnitId Fsdp1Policy::Prefetch(UnitId current, bool forward) {
  const UnitId target = PrefetchTarget(current);
  if (target < 0) return target;
  Unshard(target, forward ? "prefetch_forward" : "prefetch_backward");
  handles_[target].prefetched = true;
  return target;
}

// _ExecOrderData._check_order: in the first iteration every rank tells all others how many units it is about
// to gather (one), then which; the host waits for both answers.
void Fsdp1Policy::CheckOrder() {
  const Unit& root = UnitOf(0);
  const CommunicatorId group =
      root.shard_communicator >= 0 ? root.shard_communicator : root.replicate_communicator;
  if (group < 0) return;
  const Bytes one{SizeBytes(DType::kInt32)};
  const Bytes all = one * partition_.communicators[group].size;
  const auto buffer = [&](const char* name, Bytes size, MemoryKind memory) {
    return builder_.AddBuffer({.name = fmt::format("order_check.{}", name),
                               .role = BufferRole::kOrderCheck,
                               .dtype = DType::kInt32,
                               .parts_bytes = {size},
                               .memory = memory,
                               .persistent = memory == MemoryKind::kHost});
  };
  const UnitId unit = builder_.unit();
  builder_.SetUnit(-1);
  builder_.SetReason("order_check");
  const BufferId own = buffer("own", one, MemoryKind::kDevice),
                 gathered = buffer("all", all, MemoryKind::kDevice);
  for (const char* what : {"count", "index"}) {
    builder_.Allocate(gathered, kCompute);
    builder_.Allocate(own, kCompute);
    builder_.Move(InstructionKind::kCopyToDevice, buffer(what, one, MemoryKind::kHost), own, kCompute);
    builder_.Move(InstructionKind::kAllGather, own, gathered, kCompute).communicator = group;
    builder_.Move(InstructionKind::kCopyToHost, gathered, buffer("answers", all, MemoryKind::kHost),
                  kCompute);
    const EventId done = builder_.Event(fmt::format("order_check.{}", what));
    builder_.Record(done, kCompute);
    builder_.HostWait(done);
    builder_.Free(own, kCompute);
    builder_.Free(gathered, kCompute);
  }
  builder_.SetUnit(unit);
  builder_.SetReason("pre_forward");
}

}  // namespace shardplan
