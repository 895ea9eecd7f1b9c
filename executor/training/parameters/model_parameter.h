// SPDX-License-Identifier: Apache-2.0
// One parameter of the model on this rank, as a unit in the per_parameter layout has it: what its modules
// hold, and how its gradient reaches the optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "shardplan/schemas/error.h"

namespace shardplan::executor {

// The user's lock is held in every function and where one is destroyed.
class ModelParameter {
 public:
  virtual ~ModelParameter() = default;

  // The shard, which the modules hold between steps and the optimizer steps.
  virtual bool requires_grad() const = 0;
  virtual at::Tensor& sharded_grad() const = 0;
  // Autograd's result of a backward: the gradient of the whole parameter; undefined: none.
  virtual at::Tensor& unsharded_grad() const = 0;
  // The dtype that autograd converts that gradient to from now on; nothing: it stays as it is made. A
  // gradient that is there has this dtype.
  virtual void SetGradDType(std::optional<at::ScalarType> dtype) = 0;
  // ... as the tensor to reduce. Throws TrainingError.
  virtual at::Tensor LocalGradient() const { return unsharded_grad(); }

  // The modules hold the unsharded / the sharded parameter from now on.
  virtual Status BindUnsharded() = 0;
  virtual Status BindSharded() = 0;

  // Has the user registered hooks on the gradient of the shard?
  virtual bool HasGradHooks() const { return false; }
  // Runs them, the gradient being there. They throw what they throw.
  virtual void RunGradHooks() const {}

  // `local`, which shares the memory of the reduced gradient, becomes the shard's gradient; it is added to
  // one that is there already.
  virtual Status PublishGrad(const at::Tensor& local) = 0;
  // The plan drops the gradient: lets go of its memory, unless somebody else holds it.
  virtual void ForgetGrad() = 0;
};

}  // namespace shardplan::executor
