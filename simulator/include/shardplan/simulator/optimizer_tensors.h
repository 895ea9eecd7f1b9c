// SPDX-License-Identifier: Apache-2.0
// Tensors of torch.optim's optimizers (2.11, 2.15): the states they keep, and the temporaries of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// One tensor that the optimizer steps, as this rank holds it.
struct OptimizerShard {
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  std::int32_t parameter = 0;       // index into Unit::parameters; of a flat parameter: its first one
  std::optional<DType> grad_dtype;  // of its gradient, where that is another
  bool operator==(const OptimizerShard&) const = default;
};

Bytes SizeBytes(const OptimizerShard& shard);

// The optimizer's parameters for a unit that `ranks` ranks shard, on the first rank: trainable parameters,
// their pieces, or the whole flat parameter (flat, without original parameters). Pieces of a flat parameter
// have one dimension.
std::vector<OptimizerShard> OptimizerShardsOf(const Unit& unit, std::int64_t ranks, bool use_orig_params);

// PyTorch's default: foreach; a loop for Adafactor.
OptimizerImplementation ImplementationOf(const Optimizer& optimizer);

// Requested sizes of what the first step leaves behind for a shard, in order of creation. Step counts are on
// the device with the fused kernel and with `capturable` only.
std::vector<Bytes> OptimizerStates(const Optimizer& optimizer, const OptimizerShard& shard);

// Requested sizes of the temporaries of a step that are alive at the same time, where that is most; `shards`
// in the optimizer's order. As the Python of torch/optim/{adam,sgd,_adafactor}.py makes and drops them.
std::vector<Bytes> OptimizerTemporaries(const Optimizer& optimizer,
                                        const std::vector<OptimizerShard>& shards);

// A temporary is taken, or one of those taken so far is dropped.
struct OptimizerTensorStep {
  Bytes taken;
  std::int32_t dropped = -1;  // which of those taken, from 0; -1: none
  bool operator==(const OptimizerTensorStep&) const = default;
};

// All temporaries of the same step, one after the other. What is not dropped is when the step ends.
std::vector<OptimizerTensorStep> OptimizerTensorSteps(const Optimizer& optimizer,
                                                      const std::vector<OptimizerShard>& shards);

}  // namespace shardplan
