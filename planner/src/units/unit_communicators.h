// SPDX-License-Identifier: Apache-2.0
// The ranks that each fsdp2 unit shards and replicates over, and the communicators for them.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan {

class UnitCommunicators {
 public:
  explicit UnitCommunicators(const Strategy& strategy) : strategy_(strategy) {}

  // Makes the mesh and the groups of units that give none. kBadInput for a mesh that does not fit.
  Status Begin(const Trace& trace, std::int64_t cluster_ranks, Partition& partition);
  const Mesh& mesh() const { return mesh_; }

  // The modules that the all-reduce hooks name. kBadInput for one that matches nothing.
  Status FindHooks(const Trace& trace, const ModelIndex& index);

  // The unit's sizes and digits; `own`: of its call, or null.
  Status SetRanks(const DataParallelDims* own, const std::string& pointer, UnitChoice& choice) const;
  // Every communicator of the unit, made when it is first needed. After the unit's other knobs are set.
  Status SetCommunicators(const std::string& pointer, UnitChoice& choice, Partition& partition);

 private:
  Status CheckDims(const DataParallelDims& dims, const std::string& pointer) const;
  CommunicatorId GroupOf(const std::string& name, const MeshDigits& digits, Partition& partition);
  CommunicatorId ReplicateGroup(const std::string& name, const UnitChoice& choice, Partition& partition);
  CommunicatorId GroupOfDim(const std::string& name, Partition& partition);
  bool SeparatesReduceScatter() const;
  CommunicatorId SeparateGroup(CommunicatorId shard, Partition& partition);
  Status SetHook(const std::string& pointer, UnitChoice& choice, Partition& partition);
  Status SetPostForward(const std::string& pointer, UnitChoice& choice, Partition& partition);
  Status SetLevels(UnitChoice& choice, Partition& partition);

  const Strategy& strategy_;
  Mesh mesh_;
  DataParallelDims data_parallel_;                             // of units that give none
  std::vector<std::pair<MeshDigits, CommunicatorId>> groups_;  // made so far
  std::optional<CommunicatorId> one_replica_;                  // where the replicas are one
  std::map<CommunicatorId, CommunicatorId> separate_;          // shard group -> reduce-scatter's own
  std::map<std::pair<std::int64_t, std::int64_t>, CommunicatorId> post_forward_;  // by size and stride
  std::map<CommunicatorId, std::pair<CommunicatorId, CommunicatorId>> levels_;  // shard group -> inner, outer
  std::vector<std::set<ModuleId>> hooked_;  // by all-reduce hook: the modules it names
};

}  // namespace shardplan
