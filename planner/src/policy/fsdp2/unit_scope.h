// SPDX-License-Identifier: Apache-2.0
// One unit as the classes of its parameter group see it: what choose_units decided about it, and the program
// with the unit's name before the names of events and buffers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan::fsdp2 {

class UnitScope {
 public:
  UnitScope(UnitId id, const Partition& partition, const Strategy& strategy, ProgramBuilder& program);

  UnitId id() const { return id_; }
  const Partition& partition() const { return partition_; }
  const UnitChoice& choice() const { return partition_.units[id_]; }
  const Unit& unit() const { return choice().unit; }
  ProgramBuilder& program() const { return program_; }
  const PyTorchRules& rules() const { return rules_; }

  std::string Name() const;
  // The last of the parameter groups of its modules.
  bool IsLastGroup() const { return unit().parameter_group + 1 == choice().groups; }
  std::int64_t shard_ranks() const { return choice().shard_size; }
  bool offloads() const { return choice().cpu_offload; }
  MemoryKind shard_memory() const;  // of the sharded parameters and, where they are offloaded, gradients
  std::vector<std::int32_t> AllParameters() const;
  // Cut along another dimension than the first: the pieces of the ranks do not lie one behind another.
  bool IsChunked(std::int32_t parameter) const;

  EventId Event(std::string_view what) const;
  BufferId Buffer(BufferRole role, DType dtype, std::vector<Bytes> parts,
                  std::vector<std::int32_t> parameters, std::string_view suffix = {},
                  MemoryKind memory = MemoryKind::kDevice) const;
  // A staging buffer of a collective: from the process group's own memory pool when that is asked for
  // (DefaultAllocMixin, ProcessGroupAllocMixin).
  BufferId StagingBuffer(bool from_process_group, BufferRole role, DType dtype, Bytes bytes,
                         std::vector<std::int32_t> parameters, std::string_view suffix = {}) const;

 private:
  const UnitId id_;
  const Partition& partition_;
  const bool pin_memory_;
  const PyTorchRules rules_;
  ProgramBuilder& program_;
};

}  // namespace shardplan::fsdp2
