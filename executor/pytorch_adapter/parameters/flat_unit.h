// SPDX-License-Identifier: Apache-2.0
// A flat unit (FSDP1's layout) on this rank: what its modules hold, what the optimizer sees, and how the two
// and the rank's shard stay the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "binding/py_ref.h"
#include "parameters/flat_gradient.h"
#include "parameters/model_parameter.h"
#include "shardplan/schemas/error.h"

namespace shardplan::python {

// [Note: visible parameters]
// Without original parameters the optimizer sees the unit's flat parameter, whose data is the rank's whole
// shard. With them it sees the model's own nn.Parameters: each one's data is the slice of it that lies in the
// shard, one-dimensional (the whole parameter in its shape when the unit is not sharded), or empty. Both are
// views of the shard, so what the optimizer does in place is done to the shard.
struct VisibleParameter {
  PyRef object;                      // nn.Parameter
  std::string fqn;                   // for people
  std::int64_t offset = 0;           // elements before it in the shard
  std::vector<std::int64_t> shape;   // of its data
  bool in_shard = true;              // false: no element of it is in this rank's shard
  std::vector<ParameterSlot> slots;  // where modules register it
};

// The GIL must be held in every function and where one is destroyed.
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

  // shard: 1-D, padding included; used in place. views: by parameter of the unit, the places that hold its
  // unsharded view.
  FlatUnit(Options options, at::Tensor shard, std::vector<VisibleParameter> visible,
           std::vector<std::vector<ParameterSlot>> views, std::shared_ptr<FlatGradient> gradient);

  const Options& options() const { return options_; }
  const at::Tensor& shard() const { return shard_; }
  FlatGradient& gradient() { return *gradient_; }

  // The modules hold `views` (one per parameter) from now on. With `track` the views get a history, so that
  // their gradients arrive in gradient(), and are what BindViews() binds again in the backward.
  Status BindViews(std::vector<at::Tensor> views, bool track);
  Status BindViewsAgain();
  // The modules hold the visible parameters again. Without original parameters they go on holding views.
  Status BindSharded();

  // Runs work on the stream that reads the shard next.
  using Issue = std::function<Status(const std::function<void()>&)>;
  // What the user replaced since (a parameter's data, a parameter, a gradient that the plan accumulates into)
  // is copied into the shard. FlatParamHandle._writeback_orig_params. kNegative: it has another shape.
  Status WriteBack(const Issue& issue);

  // Does the original parameter need a gradient? Nothing where there are none: the flat one is PyTorch's.
  std::optional<bool> RequiresGrad(std::int32_t parameter) const;

  // `local`, the reduced gradient of the shard, becomes the visible parameters' .grad, in place of the one
  // that the plan has added to (WriteBack saw what the user made of that); it is added to one that the plan
  // let go of.
  Status PublishGradient(const at::Tensor& local);
  // A backward that reduces gradients is over: a unit that it did not reach may get zeros all the same.
  void PublishZeros();
  // Runs the optimizers that the user hung on an original parameter (its _in_backward_optimizers, as
  // torch.distributed.optim._apply_optimizer_in_backward does) when it has a gradient, and drops that.
  Status StepInBackward(std::int32_t parameter);
  // The plan lets go of the gradient: what it computes next is a new one.
  void ForgetGradient() { published_ = at::Tensor(); }
  // The step is abandoned: no gradient is there, neither unreduced nor of a visible parameter.
  void DropGradient();
  // A frozen unit registers hooks on its inputs once a backward; true for the first call since Finish.
  bool ClaimInputHooks() { return !std::exchange(input_hooks_, true); }
  // The backward is over.
  void Finish() { input_hooks_ = false; }

 private:
  at::Tensor Slice(const at::Tensor& whole, const VisibleParameter& visible) const;
  Status CheckDtype(const VisibleParameter& visible) const;
  Status WriteBackParameter(VisibleParameter& visible, const Issue& issue);
  Status WriteBackGradient(const VisibleParameter& visible, const Issue& issue);

  Options options_;
  at::Tensor shard_;
  std::vector<VisibleParameter> visible_;
  std::vector<std::vector<ParameterSlot>> view_slots_;
  std::shared_ptr<FlatGradient> gradient_;
  std::vector<PyRef> views_;  // bound last in a forward
  bool views_bound_ = false;
  bool input_hooks_ = false;
  at::Tensor published_;  // the plan's gradient that .grad are views of
};

}  // namespace shardplan::python
