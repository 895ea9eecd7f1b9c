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
inline OptimizerCost operator+(const OptimizerCost& a, const OptimizerCost& b) {
  return {a.read_bytes + b.read_bytes, a.written_bytes + b.written_bytes, a.kernels + b.kernels};
}

// By where the shards are.
struct OptimizerWork {
  OptimizerCost on_device;
  OptimizerCost on_host;
};

// `unit` -1: all units. The parameters are those that require a gradient, as this rank's shards hold them.
// `parameter` of the unit, -1: all of them. Of a flat parameter that one has its share by elements: ranks
// hold different pieces, and this is what they have on average.
OptimizerWork WorkOfOptimizerStep(const Plan& plan, UnitId unit, std::int32_t parameter);

// Requested sizes of the tensors that the first step of `unit` (-1: all) leaves behind for the shards in
// device or host memory, in order of creation.
std::vector<Bytes> OptimizerStateTensors(const Plan& plan, UnitId unit, bool on_device);

// Requested sizes of the temporaries that are alive at the same time inside a step, for the same shards.
std::vector<Bytes> OptimizerTemporaries(const Plan& plan, UnitId unit, bool on_device);

}  // namespace shardplan
