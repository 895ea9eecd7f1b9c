// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/unit_scope.h"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp2 {

UnitScope::UnitScope(UnitId id, const Partition& partition, const Strategy& strategy, ProgramBuilder& program)
    : id_(id),
      partition_(partition),
      pin_memory_(strategy.pin_memory),
      rules_(RulesOf(strategy)),
      program_(program) {
  SHARDPLAN_ASSERT(id >= 0 && id < std::ssize(partition.units),
                   "ids of units are indices into the partition");
}

std::string UnitScope::Name() const { return DisplayName(unit().fqn); }

MemoryKind UnitScope::shard_memory() const {
  if (!offloads()) return MemoryKind::kDevice;
  return pin_memory_ ? MemoryKind::kPinnedHost : MemoryKind::kHost;
}

std::vector<std::int32_t> UnitScope::AllParameters() const {
  std::vector<std::int32_t> all(unit().parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

bool UnitScope::IsChunked(std::int32_t parameter) const {
  return shard_ranks() > 1 && unit().parameters[parameter].shard_dim != 0;
}

EventId UnitScope::Event(std::string_view what) const {
  return program_.Event(fmt::format("{}.{}", Name(), what));
}

BufferId UnitScope::Buffer(BufferRole role, DType dtype, std::vector<Bytes> parts,
                           std::vector<std::int32_t> parameters, std::string_view suffix,
                           MemoryKind memory) const {
  return program_.UnitBuffer(id_, role, dtype, std::move(parts), std::move(parameters), suffix, memory);
}

BufferId UnitScope::StagingBuffer(bool from_process_group, BufferRole role, DType dtype, Bytes bytes,
                                  std::vector<std::int32_t> parameters, std::string_view suffix) const {
  const CommunicatorId pool = from_process_group ? unit().shard_communicator : -1;
  return program_.UnitBuffer(id_, role, dtype, {bytes}, std::move(parameters), suffix, MemoryKind::kDevice,
                             pool);
}

}  // namespace shardplan::fsdp2
