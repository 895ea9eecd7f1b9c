// Plans to run: FSDP2-like and FSDP1-like steps over a few small units, written down by hand (not by the
// planner), with the knobs that change what the executor has to do.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

struct ShardedPlanOptions {
  std::int64_t shards = 2;
  std::int64_t replicas = 1;
  std::int64_t post_forward = 0;  // > 1: reshard to this smaller mesh after the forward
  int units = 3;
  int microbatches = 1;
  bool flat = false;           // FSDP1: one flat parameter per unit, gathered in place
  bool second_dim = false;     // per_parameter: one parameter is sharded on dim 1
  bool rate_limiter = false;   // host waits
  bool sum_and_scale = false;  // divide before and after instead of averaging
  DType param_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;
};
std::string ToString(const ShardedPlanOptions& options);

// Steps: one, repeated. Verifies.
Plan MakeShardedPlan(const ShardedPlanOptions& options);

// What every backend is tested with.
std::vector<ShardedPlanOptions> ConformanceCases();

}  // namespace shardplan::test
