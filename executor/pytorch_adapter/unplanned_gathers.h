// Units that are gathered by no instruction of the plan: in an evaluation, by a call of the user, in a
// fallback.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "evaluation.h"
#include "extensions.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/torch_device.h"
#include "unit_state.h"

namespace shardplan::python {

// Members throw std::runtime_error with a message for a person.
class UnplannedGathers {
 public:
  // model: binds the parameters. groups: by CommunicatorId. shards: by unit and parameter. All but `groups`
  // outlive this.
  UnplannedGathers(const Plan& plan, executor::TorchDevice& device, executor::Model& model,
                   std::vector<UnitState>& units, Extensions& extensions,
                   std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
                   const std::vector<std::vector<at::Tensor>>& shards);

  // Gathers the unit and binds its parameters, unless it is unsharded already. full_precision: a unit that is
  // not to be gathered in the low one.
  void Unshard(UnitId unit, bool full_precision = false);
  // Frees what Unshard gathered; does nothing for what the plan gathered.
  void Reshard(UnitId unit);
  void ReshardAll();
  // A parameter of a flat unit that Unshard has gathered, in its shape.
  Result<at::Tensor> FlatView(UnitId unit, std::int32_t parameter) const {
    return evaluation_.FlatView(unit, parameter);
  }

 private:
  executor::TorchDevice& device_;
  executor::Model& model_;
  std::vector<UnitState>& units_;
  Extensions& extensions_;
  Evaluation evaluation_;
};

}  // namespace shardplan::python
