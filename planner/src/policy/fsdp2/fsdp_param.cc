// SPDX-License-Identifier: Apache-2.0
// [Note: what goes into an all-gather]
// Parameters that are cast use one flat buffer of the low precision; those of an all-gather extension use the
// tensors that the extension makes; the others are copied straight from their shards. A copy-in moves the
// parameters that both its buffers hold; where a unit has several kinds, the shards are copied first and the
// others over them.
#include "policy/fsdp2/fsdp_param.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {
namespace {

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

FsdpParams::FsdpParams(const UnitScope& scope) : scope_(scope) {
  const Unit& unit = scope.unit();
  const std::int64_t ranks = scope.shard_ranks();
  const std::vector<std::int32_t> all = scope.AllParameters();
  SHARDPLAN_ASSERT(!all.empty(), "a unit without parameters has no group");
  sharded_ = scope.Buffer(BufferRole::kParamSharded, unit.orig_dtype, OriginalShardParts(unit, ranks), all,
                          {}, scope.shard_memory());
  unsharded_ = scope.Buffer(BufferRole::kParamUnsharded, unit.param_dtype, UnshardedParts(unit, ranks), all);
  MakeExtensionBuffers();
  std::vector<std::int32_t> chunked;
  std::ranges::copy_if(all, std::back_inserter(chunked), [&](std::int32_t p) { return scope.IsChunked(p); });
  if (chunked.empty()) return;
  chunks_ = scope.Buffer(BufferRole::kAllGatherInput, unit.param_dtype,
                         Pick(UnshardedParts(unit, ranks), chunked), chunked, "chunks");
}

void FsdpParams::MakeExtensionBuffers() {
  std::vector<std::int32_t> extended;
  std::vector<Bytes> gathered, unsharded;
  for (const std::int32_t p : scope_.AllParameters()) {
    const UnitParameter& parameter = scope_.unit().parameters[p];
    if (parameter.gathered.empty()) {
      SHARDPLAN_ASSERT(parameter.unsharded.empty(), "an extension that allocates gathers too");
      continue;
    }
    extended.push_back(p);
    for (std::size_t t = 1; t < parameter.gathered.size(); ++t) {
      const ExtensionBuffer& tensor = parameter.gathered[t];
      gathered.push_back(Bytes{tensor.numel * scope_.shard_ranks() * SizeBytes(tensor.dtype)});
    }
    for (const ExtensionBuffer& tensor : parameter.unsharded) {
      unsharded.push_back(Bytes{tensor.numel * SizeBytes(tensor.dtype)});
    }
  }
  const auto make = [&](const std::vector<Bytes>& parts, BufferRole role) {
    return parts.empty() ? BufferId{-1} : scope_.Buffer(role, DType::kUInt8, parts, extended);
  };
  extension_gathered_ = make(gathered, BufferRole::kExtensionGathered);
  extension_unsharded_ = make(unsharded, BufferRole::kExtensionUnsharded);
}

// FSDPParam.param_dtype is set, and no extension takes the cast over.
bool FsdpParams::Casts(std::int32_t p) const {
  const UnitParameter& parameter = scope_.unit().parameters[p];
  return parameter.gathered.empty() && ComputeDType(scope_.unit(), parameter) != parameter.dtype;
}

// Allocates a buffer of these parameters and copies what `sources` have of them into it.
BufferId FsdpParams::CopyInto(const std::vector<BufferId>& sources, std::vector<Bytes> parts,
                              std::vector<std::int32_t> parameters, std::string_view suffix,
                              StreamId stream) const {
  const BufferId into = scope_.Buffer(BufferRole::kAllGatherInput, scope_.unit().param_dtype,
                                      std::move(parts), std::move(parameters), suffix);
  scope_.program().Allocate(into, stream);
  for (const BufferId source : sources) {
    scope_.program().Move(InstructionKind::kCopyIn, source, into, stream);
  }
  return into;
}

FsdpParams::AllGatherInputs FsdpParams::GetAllGatherInputs(StreamId stream) const {
  SHARDPLAN_ASSERT(!is_unsharded(), "unshard returns where the parameters are unsharded");
  const Unit& unit = scope_.unit();
  const std::int64_t ranks = scope_.shard_ranks();
  const bool post_forward = is_sharded_post_forward();
  if (scope_.offloads() && !post_forward) return CopyShardsToDevice(stream);
  std::vector<std::int32_t> plain, cast, extended;
  for (const std::int32_t p : scope_.AllParameters()) {
    const bool makes = MakesTensors(unit.parameters[p], ranks);
    (makes ? extended : Casts(p) ? cast : plain).push_back(p);
  }
  const std::vector<Bytes> parts = GatherInputParts(unit, ranks);
  const auto shards = [&](const std::vector<std::int32_t>& of) {
    return post_forward ? Pick(state_.sharded_post_forward_params, of) : std::vector{sharded_};
  };
  AllGatherInputs inputs;
  const auto add_temporary = [&](BufferId buffer) {
    inputs.temporaries.push_back(buffer);
    inputs.sources.push_back(buffer);
  };
  if (!plain.empty()) inputs.sources = shards(plain);
  if (!extended.empty()) {
    add_temporary(
        CopyInto(shards(extended), Pick(parts, extended), extended, cast.empty() ? "" : "extension", stream));
  }
  if (!cast.empty()) {  // all at once into one flat buffer of the low precision
    Bytes bytes = Sum(Pick(parts, cast));
    if (post_forward) bytes.value = bytes.value * ranks / state_.post_forward_ranks;
    add_temporary(CopyInto(shards(cast), {bytes}, cast, post_forward ? "post_forward" : "", stream));
  }
  return inputs;
}

// Offloaded shards are copied to the device parameter by parameter, each cast before the next one is copied.
FsdpParams::AllGatherInputs FsdpParams::CopyShardsToDevice(StreamId stream) const {
  const Unit& unit = scope_.unit();
  ProgramBuilder& program = scope_.program();
  const std::vector<std::int32_t> all = scope_.AllParameters();
  const std::vector<Bytes> copies = OriginalShardParts(unit, scope_.shard_ranks());
  const std::vector<Bytes> inputs = GatherInputParts(unit, scope_.shard_ranks());
  const auto changes = [&](std::int32_t p) {
    return Casts(p) || MakesTensors(unit.parameters[p], scope_.shard_ranks());
  };
  std::vector<BufferId> sources;
  const auto copy = [&](BufferId to) {
    program.Allocate(to, stream);
    program.Move(InstructionKind::kCopyToDevice, sharded_, to, stream);
  };
  if (std::ranges::none_of(all, changes)) {
    sources.push_back(scope_.Buffer(BufferRole::kAllGatherInput, unit.param_dtype, inputs, all));
    copy(sources.back());
    return {sources, sources};
  }
  for (const std::int32_t p : all) {
    const BufferId original = scope_.Buffer(BufferRole::kAllGatherInput, unit.parameters[p].dtype,
                                            {copies[p]}, {p}, fmt::format("device.{}", p));
    copy(original);
    sources.push_back(original);
    if (!changes(p)) continue;
    sources.back() = CopyInto({original}, {inputs[p]}, {p}, fmt::format("cast.{}", p), stream);
    program.Free(original, stream);
  }
  return {sources, sources};
}

void FsdpParams::KeepStorage() {
  std::vector<shardplan::Buffer>& buffers = scope_.program().plan().buffers;
  buffers[unsharded_].persistent = true;
  if (extension_gathered_ >= 0) buffers[extension_gathered_].persistent = true;
}

void FsdpParams::AllocAllGatherOutputs() const {
  if (KeepsStorage()) return;
  scope_.program().Allocate(unsharded_, kCompute);
  if (extension_gathered_ >= 0) scope_.program().Allocate(extension_gathered_, kCompute);
}

void FsdpParams::CopyOut(BufferId all_gather_output) const {
  ProgramBuilder& program = scope_.program();
  if (chunks_ >= 0) program.Allocate(chunks_, kCompute);
  program.Move(InstructionKind::kCopyOut, all_gather_output, unsharded_, kCompute);
  if (chunks_ >= 0) program.Free(chunks_, kCompute);
}

void FsdpParams::CopyOutOfShards() const {
  SHARDPLAN_ASSERT(scope_.shard_ranks() == 1, "several ranks gather");
  MakeShardCasts();
  scope_.program().Move(InstructionKind::kCopyOut, sharded_, unsharded_, kCompute);
}

// One rank: each shard is copied, cast where that is asked for, into the unsharded parameter. The casts are
// temporaries, the last of which lives until all are copied.
void FsdpParams::MakeShardCasts() const {
  const Unit& unit = scope_.unit();
  ProgramBuilder& program = scope_.program();
  const std::vector<Bytes> parts = GatherInputParts(unit, 1);
  const std::vector<Bytes> originals = OriginalShardParts(unit, 1);
  std::vector<BufferId> last;
  for (const std::int32_t p : scope_.AllParameters()) {
    std::vector<BufferId> made;
    const auto add = [&](DType dtype, Bytes bytes, std::string_view what) {
      made.push_back(
          scope_.Buffer(BufferRole::kAllGatherInput, dtype, {bytes}, {p}, fmt::format("{}.{}", what, p)));
      program.Allocate(made.back(), kCompute);
    };
    if (scope_.offloads()) add(unit.parameters[p].dtype, originals[p], "device");
    if (Casts(p)) add(ComputeDType(unit, unit.parameters[p]), parts[p], "cast");
    for (const BufferId buffer : last) program.Free(buffer, kCompute);
    last = std::move(made);
  }
  for (const BufferId buffer : last) program.Free(buffer, kCompute);
}

void FsdpParams::InitUnshardedParams() const {
  if (extension_unsharded_ >= 0) scope_.program().Allocate(extension_unsharded_, kCompute);
}

void FsdpParams::FreeUnshardedParams() const {
  for (const BufferId buffer : {unsharded_, extension_gathered_, extension_unsharded_}) {
    if (buffer >= 0 && !scope_.program().plan().buffers[buffer].persistent)
      scope_.program().Free(buffer, kCompute);
  }
}

void FsdpParams::ToSharded() {
  if (is_sharded()) return;
  scope_.program().Emit(InstructionKind::kBindSharded, kHost).src = sharded_;
  if (is_unsharded()) FreeUnshardedParams();
  state_.sharded_state = ShardedState::kSharded;
}

// Parameter by parameter: its shard of the smaller mesh is copied, then the whole is freed.
void FsdpParams::ToShardedPostForward(std::int64_t ranks) {
  if (is_sharded_post_forward()) return;
  SHARDPLAN_ASSERT(ranks > 0, "0 means that the parameters stay unsharded");
  const Unit& unit = scope_.unit();
  ProgramBuilder& program = scope_.program();
  const std::vector<Bytes> parts = UnshardedParts(unit, scope_.shard_ranks());
  const std::vector<BufferId> old = std::exchange(state_.sharded_post_forward_params, {});
  for (const std::int32_t p : scope_.AllParameters()) {
    const BufferId shard =
        scope_.Buffer(BufferRole::kParamPostForwardShard, ComputeDType(unit, unit.parameters[p]),
                      {Bytes{parts[p].value / ranks}}, {p}, parts.size() == 1 ? "" : fmt::format("p{}", p));
    if (!old.empty()) program.Free(old[p], kCompute);
    program.Allocate(shard, kCompute);
    program.Move(InstructionKind::kReshardPostForward, unsharded_, shard, kCompute).communicator =
        unit.post_forward_communicator;
    if (p == 0) program.Emit(InstructionKind::kBindSharded, kHost).src = shard;  // stands for all
    const bool last = p + 1 == std::ssize(parts);
    last || KeepsStorage() ? FreeUnshardedParams() : program.FreeParts(unsharded_, kCompute, {p});
    state_.sharded_post_forward_params.push_back(shard);
  }
  state_.post_forward_ranks = ranks;
  state_.sharded_state = ShardedState::kShardedPostForward;
}

void FsdpParams::ToUnsharded() {
  SHARDPLAN_ASSERT(!is_unsharded(), "unshard returns where the parameters are unsharded");
  if (is_sharded_post_forward()) {
    for (const BufferId shard : std::exchange(state_.sharded_post_forward_params, {})) {
      scope_.program().Free(shard, kCompute);
    }
    state_.post_forward_ranks = 0;
  }
  scope_.program().Emit(InstructionKind::kBindUnsharded, kHost).src = unsharded_;
  state_.sharded_state = ShardedState::kUnsharded;
  has_unsharded_params_ = true;
}

}  // namespace shardplan::fsdp2
