// SPDX-License-Identifier: Apache-2.0
// Plans of resharding: the copies that take a state from one layout to another
// (docs/reference/reshard-format.md), and the layouts that checkpoints get.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/checkpoint.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

struct ReshardOptions {
  std::int64_t ranks_per_node = 8;
  Bytes budget_bytes{kUsualReshardBudget};
  // Tensors of the target that the source lacks are left out of the plan's target instead of an error.
  bool lenient = false;
};

// Every byte that a rank of the target holds comes from one rank: itself where it has it, else one of its
// node, else any, the one that sends least. A copy is as large as both layouts allow. Tensors of the source
// that the target lacks are not moved. kBadInput: a layout is none, a tensor is missing, or has another shape
// or dtype; `pointer` begins with /source or /target.
Result<ReshardPlan> PlanReshard(const StateLayout& source, const StateLayout& target,
                                const ReshardOptions& options = {});

enum class CheckpointLayout : std::uint8_t { kPerParameter, kFlat, kWhole };

struct CheckpointLayoutOptions {
  CheckpointLayout layout = CheckpointLayout::kPerParameter;
  // "replicate" holds copies, every other dimension shards.
  std::vector<StrategyMeshDim> mesh;
  // kFlat: the modules whose parameters lie together (FQNs or patterns, as unit rules); the rest is the
  // root's.
  std::vector<std::string> units = {};
};

// The places of a checkpoint's tensors on the ranks of a mesh. kPerParameter: rows of each. kFlat: the
// parameters of a unit one behind the other, and likewise each kind of optimizer state that has their shapes;
// what belongs to no parameter is whole on all ranks. A name is a parameter's behind "model.", where any name
// begins so, and a state's behind "state." ("optimizer.state.layers.0.weight.exp_avg").
Result<StateLayout> LayoutOfCheckpoint(const Checkpoint& checkpoint, const CheckpointLayoutOptions& options);

// `layout`, of parameters and states by the names of a plan ("layers.0.weight",
// "state.layers.0.weight.exp_avg"), for the checkpoint's names. kBadInput: it lacks a tensor of the
// checkpoint. `lenient`: that is whole on all ranks then.
Result<StateLayout> LayoutForCheckpoint(const Checkpoint& checkpoint, const StateLayout& layout,
                                        bool lenient);

}  // namespace shardplan
