// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/context.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "units/layout.h"

namespace shardplan::fsdp1 {

std::string Context::EventName(UnitId id, std::string_view what) const {
  return fmt::format("{}.{}", DisplayName(UnitOf(id).fqn), what);
}

BufferId Context::FlatBuffer(UnitId id, BufferRole role, DType dtype, std::int64_t numel,
                             std::string_view suffix, MemoryKind memory) const {
  std::vector<std::int32_t> all(UnitOf(id).parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return builder.UnitBuffer(id, role, dtype, {Bytes{numel * SizeBytes(dtype)}}, std::move(all), suffix,
                            memory);
}

void Context::SynchronizeStream(StreamId stream, const std::string& event) const {
  const EventId id = builder.Event(event);
  builder.Record(id, stream);
  builder.HostWait(id);
}

Result<FlatParamConfig> MakeFlatParamConfig(const Partition& partition, const Strategy& strategy, UnitId id) {
  const UnitChoice& choice = partition.units[id];
  const Unit& unit = choice.unit;
  FlatParamConfig config;
  const auto trains = [](const UnitParameter& parameter) { return parameter.requires_grad; };
  config.requires_grad = std::ranges::any_of(unit.parameters, trains);
  if (config.requires_grad && !strategy.fsdp1.use_orig_params &&
      !std::ranges::all_of(unit.parameters, trains)) {
    return MakeInputError("/fsdp1/use_orig_params",
                          "a unit has trainable and frozen parameters, which needs use_orig_params",
                          DisplayName(unit.fqn), "true");
  }
  const UnitParameter& last = unit.parameters.back();
  config.numel = strategy.fsdp1.use_orig_params ? unit.flat_numel : last.flat_offset + Numel(last);
  const Fsdp1Sharding sharding = choice.sharding;
  // On one rank FSDP1 switches to NO_SHARD.
  config.sharded = sharding != Fsdp1Sharding::kNoShard && unit.shard_communicator >= 0;
  config.ranks = config.sharded ? partition.communicators[unit.shard_communicator].size : std::int64_t{1};
  config.reshards_after_forward =
      config.sharded && (sharding == Fsdp1Sharding::kFullShard || sharding == Fsdp1Sharding::kHybridShard);
  config.offloads = choice.cpu_offload;
  config.casts_params = unit.param_dtype != unit.orig_dtype;
  return config;
}

InstructionLabel::InstructionLabel(ProgramBuilder& builder, UnitId unit, std::string_view reason)
    : builder_(builder), unit_(builder.unit()), reason_(builder.reason()) {
  builder.SetUnit(unit);
  builder.SetReason(reason);
}

InstructionLabel::~InstructionLabel() {
  builder_.SetUnit(unit_);
  builder_.SetReason(reason_);
}

}  // namespace shardplan::fsdp1
