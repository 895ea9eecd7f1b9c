// SPDX-License-Identifier: Apache-2.0
// In which order a model's shards are made before the first step: where they lie decides what memory is
// split.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

struct ShardMade {
  BufferId buffer = -1;
  std::int32_t part = 0;
  bool operator==(const ShardMade&) const = default;
};

// The parts of all persistent param_sharded buffers. Shards of per_parameter units come in the order of the
// model's parameters (`to_empty` of a model that was sharded on the meta device); those of flat units as
// modules are wrapped, the inner ones first.
std::vector<ShardMade> ShardsInOrder(const Plan& plan);

}  // namespace shardplan::internal
