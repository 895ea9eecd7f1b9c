// Forwards outside the plan: under no_grad between two steps, units are gathered when entered and freed when
// left.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::python {

// [Note: evaluation]
// A plan is a program of training steps. A validation loop runs the model some unknown number of times
// between two of them, so it is not in the plan, and nothing is prefetched: each unit's all_gather is issued
// and waited for where the unit is entered. All ranks have to do the same, as in training.
class Evaluation {
 public:
  // What parameters with an all-gather extension gather, by parameter, and where it goes besides the unit's
  // own buffer: `others` the tensors behind the first ones, `allocated` what the extensions make. -1: none.
  struct Extended {
    std::map<std::int32_t, std::vector<at::Tensor>> inputs;
    BufferId others = -1;
    BufferId allocated = -1;
  };

  // groups: by CommunicatorId. shards: by unit and parameter, flat and padded. All outlive this but `groups`.
  Evaluation(const Plan& plan, executor::TorchDevice& device,
             std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
             const std::vector<std::vector<at::Tensor>>& shards);

  // Fills the unit's param_unsharded buffer. Blocks until the parameters can be read on the current stream.
  // full_precision: of a flat unit whose buffer is of another dtype than its shard, the parameters are in
  // memory of their own, in the shard's dtype.
  Status Unshard(UnitId unit, bool full_precision, const Extended& extended);
  // Frees it.
  Status Reshard(UnitId unit);
  // A parameter of a flat unit that is gathered, in its shape.
  Result<at::Tensor> FlatView(UnitId unit, std::int32_t parameter) const;

 private:
  Status GatherExtended(UnitId unit, const Extended& extended, c10d::ProcessGroup* group);

  const Plan& plan_;
  executor::TorchDevice& device_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  const std::vector<std::vector<at::Tensor>>& shards_;
  std::vector<BufferId> unsharded_buffer_;       // by UnitId
  std::vector<std::vector<BufferId>> gathered_;  // by UnitId: what Unshard allocated
  std::vector<at::Tensor> full_;                 // by UnitId: 1-D; undefined where the buffer is filled
};

}  // namespace shardplan::python
