// SPDX-License-Identifier: Apache-2.0
// The bytes that the optimizer's step moves and its launches, and its states for plans that do not say them.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/optimizers.h"
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

// A step of so many shards of so many bytes in all.
OptimizerCost CostOf(const Optimizer& optimizer, Bytes bytes, std::size_t shards);

// An update_copy_in or update_apply, as the first rank does it: the momentum's and Nesterov's interpolation
// and the cast into the pieces; or the weight decay and the sum.
OptimizerCost CostOfUpdate(const Plan& plan, const Instruction& instruction);

// By where the shards are.
struct OptimizerWork {
  OptimizerCost on_device;
  OptimizerCost on_host;
};

// The optimizer's steps of a plan. The parameters are those that require a gradient, as this rank's shards
// hold them. `unit` -1: all units. The plan outlives it.
class OptimizerSteps {
 public:
  explicit OptimizerSteps(const Plan& plan);

  // `parameter` of the unit, -1: all of them. A flat parameter counts by its share of the elements: ranks
  // hold different pieces, and this is what they have on average.
  OptimizerWork Work(UnitId unit, std::int32_t parameter) const;

  // Requested sizes of the tensors that the first step leaves behind for the shards in device or host memory,
  // in order of creation.
  std::vector<Bytes> States(UnitId unit, bool on_device) const;

  // Requested sizes of the temporaries that are alive at the same time inside a step, for the same shards.
  std::vector<Bytes> Temporaries(UnitId unit, bool on_device) const;

  // The temporaries of a step of all units, in the order of the model's parameters (flat ones: of their
  // units). Empty where the plan does not say that order.
  std::vector<OptimizerTensorStep> TensorSteps(bool on_device) const;

 private:
  // The memory of a unit's shards; units without a buffer of shards have nothing to step.
  enum class Place : std::uint8_t { kNowhere, kDevice, kHost };

  std::vector<OptimizerShard> Shards(UnitId unit, Place place) const;
  OptimizerCost CostIn(UnitId unit, std::int32_t parameter, Place place) const;

  const Plan& plan_;
  const bool original_parameters_;
  std::vector<Place> places_;  // by unit
};

}  // namespace shardplan
