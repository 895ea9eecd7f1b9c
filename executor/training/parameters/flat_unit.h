// SPDX-License-Identifier: Apache-2.0
// A flat unit (FSDP1's layout) on this rank: what its modules hold, what the optimizer sees, and how the two
// and the rank's shard stay the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "shardplan/schemas/error.h"
#include "training/parameters/flat_gradient.h"

namespace shardplan::executor {

// The user's lock is held in every function and where one is destroyed.
class FlatUnit {
 public:
  struct Options {
    bool original_parameters = false;
    bool trains = true;  // does any parameter need a gradient?
    // The dtype in which a reduced gradient is handed over (keep_low_precision_grads); nullopt: as it is.
    std::optional<at::ScalarType> grad_dtype;
    // Has it a gradient of zeros in host memory as long as there is none? FSDP1's flat parameters that are
    // offloaded have.
    bool zeros_on_host = false;
  };

  FlatUnit(Options options, std::shared_ptr<FlatGradient> gradient)
      : options_(options), gradient_(std::move(gradient)) {}
  virtual ~FlatUnit() = default;

  const Options& options() const { return options_; }
  FlatGradient& gradient() { return *gradient_; }

  // The modules hold `views` (one per parameter) from now on. With `track` the views get a history, so that
  // their gradients arrive in gradient(), and are what BindViews() binds again in the backward.
  virtual Status BindViews(std::vector<at::Tensor> views, bool track) = 0;
  virtual Status BindViewsAgain() = 0;
  // The modules hold the visible parameters again. Without original parameters they go on holding views.
  virtual Status BindSharded() = 0;

  // Runs work on the stream that reads the shard next.
  using Issue = std::function<Status(const std::function<void()>&)>;
  // Objects that the user replaced since (a parameter's data, a parameter, a gradient that the plan
  // accumulates into) are copied into the shard. FlatParamHandle._writeback_orig_params. kNegative: it has
  // another shape.
  virtual Status WriteBack(const Issue& issue) = 0;

  // Does the original parameter need a gradient? Nothing where there are none: the flat one is PyTorch's.
  virtual std::optional<bool> RequiresGrad(std::int32_t parameter) const = 0;

  // `local`, the reduced gradient of the shard, becomes the visible parameters' .grad, in place of the one
  // that the plan has added to (WriteBack saw what the user made of that); it is added to one that the plan
  // let go of.
  virtual Status PublishGradient(const at::Tensor& local) = 0;
  // A backward that reduces gradients is over: a unit that it did not reach may get zeros all the same.
  virtual void PublishZeros() = 0;
  // Runs the optimizers that the user hung on an original parameter (its _in_backward_optimizers, as
  // torch.distributed.optim._apply_optimizer_in_backward does) when it has a gradient, and drops that.
  virtual Status StepInBackward(std::int32_t parameter) = 0;
  // The plan lets go of the gradient: what it computes next is a new one.
  virtual void ForgetGradient() = 0;
  // The step is abandoned: no gradient is there, neither unreduced nor of a visible parameter.
  virtual void DropGradient() = 0;

  // A frozen unit registers hooks on its inputs once a backward; true for the first call since Finish.
  bool ClaimInputHooks() { return !std::exchange(input_hooks_, true); }
  // The backward is over.
  void Finish() { input_hooks_ = false; }

 private:
  Options options_;
  std::shared_ptr<FlatGradient> gradient_;
  bool input_hooks_ = false;
};

}  // namespace shardplan::executor
