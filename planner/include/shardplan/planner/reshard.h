// Plans of resharding: the copies that take a state from one layout to another (docs/reshard-format.md).
#pragma once

#include <cstdint>

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

}  // namespace shardplan
