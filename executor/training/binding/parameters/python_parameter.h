// SPDX-License-Identifier: Apache-2.0
// One parameter of a model in Python on this rank: which object its modules hold, and how its gradient
// reaches the optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "training/binding/py_ref.h"
#include "training/parameters/model_parameter.h"

namespace shardplan::python {

// A place where a module registers the parameter (no `dict`: holds it as an attribute). The entry of `dict`
// (module._parameters) is swapped directly unless the module's class has a __setattr__ of its own. The module
// itself is referred to weakly: it owns the hooks, which own this.
struct ParameterSlot {
  PyRef module;  // weakref
  PyRef dict;
  PyRef name;
  bool fast = true;
};

// The GIL must be held in every function and where one is destroyed.
class PythonParameter final : public executor::ModelParameter {
 public:
  // shard: nn.Parameter around a DTensor; unsharded: nn.Parameter, the autograd leaf; make_grad: callable
  // that wraps a local gradient (shaped like the shard's local tensor) into a DTensor.
  // local_grad: callable, a gradient of `unsharded` -> the local tensor to reduce; empty: it is one already.
  PythonParameter(PyRef shard, PyRef unsharded, PyRef make_grad, PyRef local_grad,
                  std::vector<ParameterSlot> slots);

  bool requires_grad() const override { return shard().requires_grad(); }
  at::Tensor& sharded_grad() const override { return shard().mutable_grad(); }
  at::Tensor& unsharded_grad() const override { return unsharded_.mutable_grad(); }
  void SetGradDType(std::optional<at::ScalarType> dtype) override { unsharded_.set_grad_dtype(dtype); }
  at::Tensor LocalGradient() const override;
  Status BindUnsharded() override;
  Status BindSharded() override;

  // The whole parameter is another tensor from now on.
  void SetUnsharded(PyRef unsharded);
  // The modules' object in its place, where the user has replaced it or what is in it since (Module.to,
  // load_state_dict(assign=True)); borrowed, null where they have not. Different ones in different modules:
  // the first that is not ours.
  PyObject* Replacement() const;
  // Is `found` what the modules hold between steps?
  bool IsShard(PyObject* found) const { return found == shard_object_.get(); }
  bool HasShardOf(const PythonParameter& other) const { return IsShard(other.shard_object_.get()); }
  // Both have the same shard, now and after it is replaced. Each reduces a gradient of its own; these are
  // added up in the shard's.
  void Tie(PythonParameter& other) { tie_ = other.tie_ = shard_object_.get(); }
  bool IsTiedWith(const PythonParameter& other) const { return tie_ != nullptr && tie_ == other.tie_; }
  // Do all modules hold the same?
  bool SlotsAgree() const;
  // The modules hold `shard` from now on: takes it for its own.
  void Adopt(PyRef shard);

  // register_post_accumulate_grad_hook.
  bool HasGradHooks() const override;
  void RunGradHooks() const override;

  // The DTensor of an earlier step is used again when nobody else holds it: making one costs more than the
  // whole hook.
  Status PublishGrad(const at::Tensor& local) override;
  void ForgetGrad() override;

 private:
  // The shard, which the modules hold between steps. Not kept: torch.utils.swap_tensors (Module.to) wants to
  // be its only owner.
  const at::Tensor& shard() const;
  bool Bind(PyObject* parameter) const;
  // False, and undefined, with a Python error set on failure.
  bool Publish(const at::Tensor& local);
  at::Tensor Gradient() const;
  bool CanReuseGrad() const;
  bool HoldsMemoryOf(const at::Tensor& local) const;  // the gradient handed out last

  PyRef shard_object_;
  PyRef unsharded_object_;
  PyRef make_grad_;
  PyRef local_grad_;
  std::vector<ParameterSlot> slots_;
  const void* tie_ = nullptr;  // the shard when it was tied; an identity
  const void* shard_impl_;     // of the tensor in shard_object_ when it was taken; an identity
  at::Tensor unsharded_;
  PyRef grad_object_;                      // DTensor made last
  PyObject* grad_local_object_ = nullptr;  // its local tensor, owned by it
};

}  // namespace shardplan::python
