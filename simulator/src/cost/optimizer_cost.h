// What the optimizer's step moves and launches, and for plans that do not say it, what it keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

struct OptimizerCost {
  Bytes read_bytes;
  Bytes written_bytes;
  std::int64_t kernels = 0;  // launches that the host pays for
};

// `unit` -1: all units. The parameters are those that require a gradient, as this rank's shards hold them.
OptimizerCost CostOfOptimizerStep(const Plan& plan, UnitId unit);

// Requested sizes of the device tensors that the first step of `unit` (-1: all) leaves behind, in order of
// creation.
std::vector<Bytes> OptimizerStateTensors(const Plan& plan, UnitId unit);

// Requested sizes of the temporaries that are alive at the same time inside a step.
std::vector<Bytes> OptimizerTemporaries(const Plan& plan, UnitId unit);

}  // namespace shardplan
