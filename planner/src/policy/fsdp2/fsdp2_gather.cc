// FSDPParamGroup: unshard, wait_for_unshard, reshard (_fsdp_param_group.py, _fsdp_collectives.py,
// _fsdp_param.py).
//
// [Note: what goes into an all-gather]
// Parameters that are cast go through one flat buffer of the low precision; those of an all-gather extension
// through the tensors that the extension makes; the others are copied straight from their shards. A copy-in
// moves the parameters that both its buffers hold; where a unit has several kinds, the shards are copied
// first and the others over them.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "policy/fsdp2/fsdp2_policy.h"
#include "units/layout.h"

namespace shardplan {
namespace {

std::vector<std::int32_t> AllParameters(const Unit& unit) {
  std::vector<std::int32_t> all(unit.parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

template <typename T>
std::vector<T> Pick(const std::vector<T>& of_all, const std::vector<std::int32_t>& parameters) {
  std::vector<T> picked;
  for (const std::int32_t p : parameters) picked.push_back(of_all[p]);
  return picked;
}

// An extension that gathers the shard as it is (same dtype and size) makes no tensor.
bool MakesTensors(const UnitParameter& parameter, std::int64_t ranks) {
  return std::ranges::any_of(parameter.gathered, [&](const ExtensionBuffer& tensor) {
    return tensor.dtype != parameter.dtype || tensor.numel != PaddedPieceNumel(parameter, ranks);
  });
}

}  // namespace

// FSDPParam.param_dtype is set, and no extension takes the cast over.
bool Fsdp2Policy::Casts(UnitId unit, std::int32_t p) const {
  const UnitParameter& parameter = UnitOf(unit).parameters[p];
  return parameter.gathered.empty() && ComputeDType(UnitOf(unit), parameter) != parameter.dtype;
}

void Fsdp2Policy::Unshard(UnitId unit, bool async, std::string_view reason) {
  Group& group = groups_[unit];
  if (group.pending || group.sharded == ShardedState::kUnsharded) return;
  if (!group.unshard_in_backward && group.training == TrainingState::kPreBackward) {
    AddFault(
        Rule::kUseBeforeUnshard,
        "set_unshard_in_backward(False) on a unit whose backward does read its parameters: PyTorch fails "
        "there, their storage is freed");
    return;
  }
  const UnitId caller = builder_.unit();
  const std::string caller_reason = builder_.reason();
  builder_.SetUnit(unit);
  builder_.SetReason(reason);
  if (group.reshard_after_forward_recorded) {
    WaitAllGatherStreams(Comm(unit), builder_.Event(EventName(unit, "reshard")));
    group.reshard_after_forward_recorded = false;
  }
  if (ShardRanks(unit) == 1) {
    group.pending = PendingAllGather{};
  } else {
    IssueAllGather(unit, async);
  }
  builder_.SetUnit(caller);
  builder_.SetReason(caller_reason);
}

void Fsdp2Policy::IssueAllGather(UnitId id, bool async) {
  Group& group = groups_[id];
  CommContext& comm = Comm(id);
  const Unit& unit = UnitOf(id);
  const bool in_hook =
      group.training == TrainingState::kForward || group.training == TrainingState::kPreBackward;
  const bool own_streams = !async && in_hook && comm.initialised;
  const StreamId copy_in = own_streams ? comm.copy_in : kCompute;
  const bool post_forward = group.sharded == ShardedState::kShardedPostForward;
  const CommunicatorId communicator = post_forward ? unit.post_forward_communicator : unit.shard_communicator;
  const StreamId gather = async ? CommunicatorStream(communicator) : own_streams ? comm.all_gather : kCompute;

  std::vector<BufferId> temporaries;  // dropped when foreach_all_gather returns
  const std::vector<BufferId> sources = GatherSources(id, copy_in, temporaries);
  // A gather over the smaller mesh moves the padding of the whole one too: its shards are cut from that.
  const Bytes gathered{Sum(GatherInputParts(unit, ShardRanks(id))).value * ShardRanks(id)};
  // A unit that runs twice in a row gathers anew while its last output is still kept.
  const auto output_buffer = [&](std::string_view suffix) {
    return CommBuffer(id, BufferRole::kAllGatherOutput, GatherDType(unit), gathered, AllParameters(unit),
                      suffix);
  };
  BufferId output = output_buffer("");
  const bool kept = comm.all_gather_unit == id && comm.all_gather_output == output;
  if (kept) output = output_buffer("again");
  builder_.Allocate(output, copy_in);
  for (const BufferId source : sources) {
    builder_.Move(InstructionKind::kCopyIn, source, output, copy_in).communicator = communicator;
  }
  builder_.WaitStream(gather, copy_in, EventName(id, "copy_in"));
  builder_.Move(InstructionKind::kAllGather, output, output, gather).communicator = communicator;
  const EventId event = builder_.Event(EventName(id, "all_gather"));
  builder_.Record(event, gather);
  for (const BufferId buffer : temporaries) builder_.Free(buffer, copy_in);
  group.pending = PendingAllGather{output, event, async};
}

// ProcessGroupNCCL runs what is issued with async_op on a stream of its own, which waits for the current one;
// the current one waits for it at the copy-out (Work.wait).
StreamId Fsdp2Policy::CommunicatorStream(CommunicatorId communicator) {
  return builder_.Stream(fmt::format("nccl.{}", partition_.communicators[communicator].name));
}

// Allocates a buffer of these parameters and copies what `sources` have of them into it.
BufferId Fsdp2Policy::CopyInto(UnitId id, const std::vector<BufferId>& sources, std::vector<Bytes> parts,
                               std::vector<std::int32_t> parameters, std::string_view suffix,
                               StreamId stream) {
  const BufferId into = builder_.UnitBuffer(id, BufferRole::kAllGatherInput, UnitOf(id).param_dtype,
                                            std::move(parts), std::move(parameters), suffix);
  builder_.Allocate(into, stream);
  for (const BufferId source : sources) builder_.Move(InstructionKind::kCopyIn, source, into, stream);
  return into;
}

// The buffers that are copied into this rank's slot of the all-gather, in order.
std::vector<BufferId> Fsdp2Policy::GatherSources(UnitId id, StreamId stream,
                                                 std::vector<BufferId>& temporaries) {
  const Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const bool post_forward = group.sharded == ShardedState::kShardedPostForward;
  if (group.offloads && !post_forward) return CopyShardsToDevice(id, stream, temporaries);
  std::vector<std::int32_t> plain, cast, extended;
  for (const std::int32_t p : AllParameters(unit)) {
    const bool makes = MakesTensors(unit.parameters[p], ShardRanks(id));
    (makes ? extended : Casts(id, p) ? cast : plain).push_back(p);
  }
  const std::vector<Bytes> parts = GatherInputParts(unit, ShardRanks(id));
  const auto shards = [&](const std::vector<std::int32_t>& of) {
    return post_forward ? Pick(group.post_forward_shards, of) : std::vector{group.param_sharded};
  };
  std::vector<BufferId> sources;
  if (!plain.empty()) sources = shards(plain);
  if (!extended.empty()) {
    temporaries.push_back(CopyInto(id, shards(extended), Pick(parts, extended), extended,
                                   cast.empty() ? "" : "extension", stream));
    sources.push_back(temporaries.back());
  }
  if (!cast.empty()) {  // all at once into one flat buffer of the low precision
    Bytes bytes = Sum(Pick(parts, cast));
    if (post_forward) bytes.value = bytes.value * ShardRanks(id) / group.post_forward_size;
    temporaries.push_back(
        CopyInto(id, shards(cast), {bytes}, cast, post_forward ? "post_forward" : "", stream));
    sources.push_back(temporaries.back());
  }
  return sources;
}

// Offloaded shards come to the device parameter by parameter, each cast before the next one comes.
std::vector<BufferId> Fsdp2Policy::CopyShardsToDevice(UnitId id, StreamId stream,
                                                      std::vector<BufferId>& temporaries) {
  const Group& group = groups_[id];
  const Unit& unit = UnitOf(id);
  const std::vector<std::int32_t> all = AllParameters(unit);
  const std::vector<Bytes> copies = OriginalShardParts(unit, ShardRanks(id));
  const std::vector<Bytes> inputs = GatherInputParts(unit, ShardRanks(id));
  const auto changes = [&](std::int32_t p) {
    return Casts(id, p) || MakesTensors(unit.parameters[p], ShardRanks(id));
  };
  std::vector<BufferId> sources;
  const auto copy = [&](BufferId to) {
    builder_.Allocate(to, stream);
    builder_.Move(InstructionKind::kCopyToDevice, group.param_sharded, to, stream);
  };
  if (std::ranges::none_of(all, changes)) {
    sources.push_back(builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.param_dtype, inputs, all));
    copy(sources.back());
  } else {
    for (const std::int32_t p : all) {
      sources.push_back(builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.parameters[p].dtype,
                                            {copies[p]}, {p}, fmt::format("device.{}", p)));
      const BufferId original = sources.back();
      copy(original);
      if (!changes(p)) continue;
      sources.back() = CopyInto(id, {original}, {inputs[p]}, {p}, fmt::format("cast.{}", p), stream);
      builder_.Free(original, stream);
    }
  }
  temporaries.insert(temporaries.end(), sources.begin(), sources.end());
  return sources;
}

// Before its root's first forward a context has no streams yet.
void Fsdp2Policy::WaitAllGatherStreams(const CommContext& comm, EventId event) {
  if (!comm.initialised) return;
  builder_.Wait(event, comm.copy_in);
  builder_.Wait(event, comm.all_gather);
}

void Fsdp2Policy::DropKeptOutput(CommContext& comm) {
  if (comm.all_gather_unit >= 0) builder_.Free(comm.all_gather_output, comm.copy_in);
  comm.all_gather_unit = -1;
}

// One rank: each shard is copied, cast where that is asked for, into the unsharded parameter. The casts are
// temporaries, the last of which lives until all are copied.
void Fsdp2Policy::CastShards(UnitId id) {
  const Unit& unit = UnitOf(id);
  const std::vector<Bytes> parts = GatherInputParts(unit, 1);
  const std::vector<Bytes> originals = OriginalShardParts(unit, 1);
  std::vector<BufferId> last;
  for (const std::int32_t p : AllParameters(unit)) {
    std::vector<BufferId> made;
    const auto add = [&](DType dtype, Bytes bytes, std::string_view what) {
      made.push_back(builder_.UnitBuffer(id, BufferRole::kAllGatherInput, dtype, {bytes}, {p},
                                         fmt::format("{}.{}", what, p)));
      builder_.Allocate(made.back(), kCompute);
    };
    if (groups_[id].offloads) add(unit.parameters[p].dtype, originals[p], "device");
    if (Casts(id, p)) add(ComputeDType(unit, unit.parameters[p]), parts[p], "cast");
    for (const BufferId buffer : last) builder_.Free(buffer, kCompute);
    last = std::move(made);
  }
  for (const BufferId buffer : last) builder_.Free(buffer, kCompute);
}

void Fsdp2Policy::CopyOut(UnitId unit, const PendingAllGather& pending) {
  const Group& group = groups_[unit];
  const bool single = ShardRanks(unit) == 1;
  if (!single) builder_.Wait(pending.event, kCompute);
  builder_.Allocate(group.param_unsharded, kCompute);
  if (group.extension_gathered >= 0) builder_.Allocate(group.extension_gathered, kCompute);
  if (single) CastShards(unit);
  // Pieces of another dimension than the first are copied out rank by rank, then put together.
  if (group.copy_out_chunks >= 0) builder_.Allocate(group.copy_out_chunks, kCompute);
  builder_.Move(InstructionKind::kCopyOut, single ? group.param_sharded : pending.output,
                group.param_unsharded, kCompute);
  if (group.copy_out_chunks >= 0) builder_.Free(group.copy_out_chunks, kCompute);
  if (group.extension_unsharded >= 0) builder_.Allocate(group.extension_unsharded, kCompute);
}

void Fsdp2Policy::WaitForUnshard(UnitId unit) {
  Group& group = groups_[unit];
  CommContext& comm = Comm(unit);
  if (!group.pending) return;
  const PendingAllGather pending = *group.pending;
  const bool single = ShardRanks(unit) == 1;
  const bool forward = group.training == TrainingState::kForward;
  BufferId previous = -1;
  if (forward && comm.all_gather_unit >= 0) {
    WaitAllGatherStreams(comm, builder_.Event(EventName(comm.all_gather_unit, "copy_out")));
    previous = comm.all_gather_output;
    comm.all_gather_unit = -1;
  }
  CopyOut(unit, pending);
  if (group.sharded == ShardedState::kShardedPostForward) {
    for (const BufferId shard : std::exchange(group.post_forward_shards, {})) builder_.Free(shard, kCompute);
  }
  builder_.Emit(InstructionKind::kBindUnsharded, -1).src = group.param_unsharded;
  group.sharded = ShardedState::kUnsharded;
  group.was_unsharded = true;
  const EventId copy_out = builder_.Event(EventName(unit, "copy_out"));
  builder_.Record(copy_out, kCompute);
  if (!pending.async && forward && !single) {
    comm.all_gather_unit = unit;
    comm.all_gather_output = pending.output;
  } else {
    WaitAllGatherStreams(comm, copy_out);
    if (!single) builder_.Free(pending.output, comm.initialised ? comm.copy_in : kCompute);
  }
  group.pending.reset();
  // The runtime's local variable names the previous result until wait_for_unshard returns.
  if (previous >= 0) {
    const UnitId caller = builder_.unit();
    builder_.SetUnit(-1);
    builder_.Free(previous, comm.copy_in);
    builder_.SetUnit(caller);
  }
}

void Fsdp2Policy::Reshard(UnitId unit) {
  Group& group = groups_[unit];
  if (group.training == TrainingState::kForward) {
    if (group.post_forward_size == 0) return;
    if (group.post_forward_size != ShardRanks(unit)) {
      ToShardedPostForward(unit);
      builder_.Record(builder_.Event(EventName(unit, "reshard")), kCompute);
      group.reshard_after_forward_recorded = true;
      return;
    }
  }
  ToSharded(unit);
}

void Fsdp2Policy::FreeUnsharded(UnitId unit) {
  const Group& group = groups_[unit];
  for (const BufferId buffer : {group.param_unsharded, group.extension_gathered, group.extension_unsharded}) {
    if (buffer >= 0) builder_.Free(buffer, kCompute);
  }
}

void Fsdp2Policy::ToSharded(UnitId unit) {
  Group& group = groups_[unit];
  if (group.sharded == ShardedState::kSharded) return;
  builder_.Emit(InstructionKind::kBindSharded, -1).src = group.param_sharded;
  if (group.sharded == ShardedState::kUnsharded) FreeUnsharded(unit);
  group.sharded = ShardedState::kSharded;
}

// Parameter by parameter: its shard of the smaller mesh is copied, then the whole goes
// (FSDPParam.to_sharded_post_forward).
void Fsdp2Policy::ToShardedPostForward(UnitId id) {
  Group& group = groups_[id];
  if (group.sharded == ShardedState::kShardedPostForward) return;
  const Unit& unit = UnitOf(id);
  const std::vector<Bytes> parts = UnshardedParts(unit, ShardRanks(id));
  const std::vector<BufferId> old = std::exchange(group.post_forward_shards, {});
  for (const std::int32_t p : AllParameters(unit)) {
    const Bytes bytes{parts[p].value / group.post_forward_size};
    const BufferId shard =
        builder_.UnitBuffer(id, BufferRole::kParamPostForwardShard, ComputeDType(unit, unit.parameters[p]),
                            {bytes}, {p}, parts.size() == 1 ? "" : fmt::format("p{}", p));
    if (!old.empty()) builder_.Free(old[p], kCompute);
    builder_.Allocate(shard, kCompute);
    builder_.Move(InstructionKind::kReshardPostForward, group.param_unsharded, shard, kCompute).communicator =
        unit.post_forward_communicator;
    if (p == 0) builder_.Emit(InstructionKind::kBindSharded, -1).src = shard;  // the first one stands for all
    const bool last = p + 1 == std::ssize(parts);
    last ? FreeUnsharded(id) : builder_.FreeParts(group.param_unsharded, kCompute, {p});
    group.post_forward_shards.push_back(shard);
  }
  group.sharded = ShardedState::kShardedPostForward;
}

}  // namespace shardplan
