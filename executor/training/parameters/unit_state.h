// SPDX-License-Identifier: Apache-2.0
// The state of one unit of the plan on this rank while a model is trained.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "training/parameters/flat_unit.h"
#include "training/parameters/model_parameter.h"

namespace shardplan::executor {

struct UnitState {
  std::vector<std::unique_ptr<ModelParameter>> parameters;  // per_parameter: in the order of Unit::parameters
  std::unique_ptr<FlatUnit> flat;                           // flat: in place of `parameters`
  std::function<void(const at::Tensor&)> reduction_hook;    // the user's, on the reduced gradients
  StreamId reduction_stream = -1;                           // of the last reduction
  std::int64_t runs = 0;                                    // forwards that have been left
  std::int64_t run_in_backward = -1;                        // the one whose pre_backward came last
  bool in_backward = false;                                 // between its pre_backward and its post_backward
  bool backward_begun = false;  // from its pre_backward to the end of the backward
  bool unsharded = false;       // its modules hold the whole parameters
  bool was_unsharded = false;   // ... have held them
  bool gathered_again = false;  // in the recomputation under way
  bool unplanned = false;       // gathered by something that is not in the plan
};

// By BufferId: the parameters of its unit that the buffer holds (schemas' ParametersOf), empty without a
// unit.
using BufferParameters = std::vector<std::vector<std::int32_t>>;

// "parameter layers.0.up.weight".
std::string ParameterText(const Plan& plan, UnitId unit, std::int32_t parameter);

}  // namespace shardplan::executor
