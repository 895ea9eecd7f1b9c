// SPDX-License-Identifier: Apache-2.0
// One parameter of the model on this rank: which object its modules hold, and how its gradient reaches the
// optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "binding/py_ref.h"

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
class ModelParameter {
 public:
  // shard: nn.Parameter around a DTensor; unsharded: nn.Parameter, the autograd leaf; make_grad: callable
  // that wraps a local gradient (shaped like the shard's local tensor) into a DTensor.
  // local_grad: callable, a gradient of `unsharded` -> the local tensor to reduce; empty: it is one already.
  ModelParameter(PyRef shard, PyRef unsharded, PyRef make_grad, PyRef local_grad,
                 std::vector<ParameterSlot> slots);

  // Of what the modules hold between steps. Not kept: torch.utils.swap_tensors (Module.to) wants to be its
  // only owner.
  const at::Tensor& shard() const;
  const at::Tensor& unsharded() const { return unsharded_; }

  // Is the gradient that autograd leaves the local tensor to reduce? Otherwise Gradient() makes that of it,
  // undefined with a Python error set on failure.
  bool HasPlainGradient() const { return !local_grad_; }
  at::Tensor Gradient() const;

  // The modules hold the unsharded / the sharded parameter from now on. False with a Python error set on
  // failure.
  bool BindUnsharded() const { return Bind(unsharded_object_.get()); }
  bool BindSharded() const { return Bind(shard_object_.get()); }
  // The whole parameter is another tensor from now on.
  void SetUnsharded(PyRef unsharded);
  // What the modules hold in its place, where the user has replaced it or what is in it since (Module.to,
  // load_state_dict(assign=True)); borrowed, null where they have not. Different ones in different modules:
  // the first that is not ours.
  PyObject* Replacement() const;
  // Is `found` what the modules hold between steps?
  bool IsShard(PyObject* found) const { return found == shard_object_.get(); }
  // Do all modules hold the same?
  bool SlotsAgree() const;
  // The modules hold `shard` from now on: takes it for its own.
  void Adopt(PyRef shard);

  // Has the user registered hooks on the sharded parameter (register_post_accumulate_grad_hook)?
  bool HasGradHooks() const;
  // Runs them, its gradient being there. They throw what they throw.
  void RunGradHooks() const;

  // Makes `local`, a view of the reduced gradient, the shard's .grad; adds to a gradient that is there
  // already. The DTensor of an earlier step is used again when nobody else holds it: making one costs more
  // than the whole hook. False with a Python error set on failure.
  bool PublishGrad(const at::Tensor& local);
  // The plan drops the gradient: lets go of its memory, unless somebody else holds it.
  void ForgetGrad() const;

 private:
  bool Bind(PyObject* parameter) const;
  bool CanReuseGrad() const;
  bool HoldsMemoryOf(const at::Tensor& local) const;  // the gradient handed out last

  PyRef shard_object_;
  PyRef unsharded_object_;
  PyRef make_grad_;
  PyRef local_grad_;
  std::vector<ParameterSlot> slots_;
  const void* shard_impl_;  // of the tensor in shard_object_ when it was taken; an identity
  at::Tensor unsharded_;
  PyRef grad_object_;                      // DTensor made last
  PyObject* grad_local_object_ = nullptr;  // its local tensor, owned by it
};

// The gradient that autograd left on the unsharded parameter, as the local tensor to reduce; undefined where
// there is none. Throws std::runtime_error.
at::Tensor LocalGradient(const ModelParameter& parameter);

}  // namespace shardplan::python
