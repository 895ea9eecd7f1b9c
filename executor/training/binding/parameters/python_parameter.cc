// SPDX-License-Identifier: Apache-2.0
#include "training/binding/parameters/python_parameter.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "training/binding/python_error.h"

namespace shardplan::python {
namespace {

// Is the object held by one owner only, seen from Python and from C++?
bool HasOneOwner(PyObject* object) {
  return Py_REFCNT(object) == 1 && THPVariable_Unpack(object).use_count() == 1;
}

PyRef LocalTensor(PyObject* dtensor) {
  return PyRef::Steal(PyObject_GetAttrString(dtensor, "_local_tensor"));
}

}  // namespace

PythonParameter::PythonParameter(PyRef shard, PyRef unsharded, PyRef make_grad, PyRef local_grad,
                                 std::vector<ParameterSlot> slots)
    : shard_object_(std::move(shard)),
      unsharded_object_(std::move(unsharded)),
      make_grad_(std::move(make_grad)),
      local_grad_(std::move(local_grad)),
      slots_(std::move(slots)),
      shard_impl_(THPVariable_Unpack(shard_object_.get()).unsafeGetTensorImpl()),
      unsharded_(THPVariable_Unpack(unsharded_object_.get())) {}

const at::Tensor& PythonParameter::shard() const { return THPVariable_Unpack(shard_object_.get()); }

at::Tensor PythonParameter::Gradient() const {
  const PyRef object = PyRef::Steal(THPVariable_Wrap(unsharded_.grad()));
  const PyRef local = PyRef::Steal(object ? PyObject_CallOneArg(local_grad_.get(), object.get()) : nullptr);
  return local ? THPVariable_Unpack(local.get()) : at::Tensor();
}

bool PythonParameter::Bind(PyObject* parameter) const {
  for (const ParameterSlot& slot : slots_) {
    if (slot.fast) {
      if (PyDict_SetItem(slot.dict.get(), slot.name.get(), parameter) != 0) return false;
      continue;
    }
    PyObject* module = PyWeakref_GetObject(slot.module.get());
    if (module == nullptr) return false;
    if (module != Py_None && PyObject_SetAttr(module, slot.name.get(), parameter) != 0) return false;
  }
  return true;
}

PyObject* PythonParameter::Replacement() const {
  for (const ParameterSlot& slot : slots_) {
    PyObject* held = PyDict_GetItem(slot.dict.get(), slot.name.get());
    if (held != shard_object_.get()) return held == nullptr ? Py_None : held;
  }
  return shard().unsafeGetTensorImpl() == shard_impl_ ? nullptr : shard_object_.get();
}

bool PythonParameter::SlotsAgree() const {
  const auto held = [](const ParameterSlot& slot) {
    return PyDict_GetItem(slot.dict.get(), slot.name.get());
  };
  return std::ranges::all_of(slots_,
                             [&](const ParameterSlot& slot) { return held(slot) == held(slots_[0]); });
}

void PythonParameter::SetUnsharded(PyRef unsharded) {
  unsharded_object_ = std::move(unsharded);
  unsharded_ = THPVariable_Unpack(unsharded_object_.get());
}

void PythonParameter::Adopt(PyRef shard_object) {
  shard_object_ = std::move(shard_object);
  shard_impl_ = shard().unsafeGetTensorImpl();
  // Gradients made before are of the other parameter.
  grad_object_ = {};
  grad_local_object_ = nullptr;
}

bool PythonParameter::CanReuseGrad() const {
  return grad_object_ && HasOneOwner(grad_object_.get()) && HasOneOwner(grad_local_object_);
}

bool PythonParameter::HoldsMemoryOf(const at::Tensor& local) const {
  return grad_object_ && local.numel() > 0 &&
         THPVariable_Unpack(grad_local_object_).storage().unsafeGetStorageImpl() ==
             local.storage().unsafeGetStorageImpl();
}

void PythonParameter::ForgetGrad() {
  if (shard().grad().defined() || !CanReuseGrad()) return;
  const at::Tensor& local = THPVariable_Unpack(grad_local_object_);
  local.unsafeGetTensorImpl()->set_storage_keep_dtype(at::empty({0}, local.options()).storage());
}

Status PythonParameter::BindUnsharded() {
  return Bind(unsharded_object_.get()) ? Status() : PythonError("binding an unsharded parameter");
}

Status PythonParameter::BindSharded() {
  return Bind(shard_object_.get()) ? Status() : PythonError("binding a sharded parameter");
}

Status PythonParameter::PublishGrad(const at::Tensor& local) {
  return Publish(local) ? Status() : PythonError("handing a gradient to its parameter");
}

bool PythonParameter::Publish(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  if (shard().grad().defined()) {
    PyRef present = PyRef::Steal(THPVariable_Wrap(shard().grad()));
    PyRef present_local = present ? LocalTensor(present.get()) : PyRef();
    if (!present_local) return false;
    at::Tensor accumulated = THPVariable_Unpack(present_local.get());
    // The plan may have accumulated in the memory that was handed out for an earlier micro-batch.
    if (accumulated.is_alias_of(local) && accumulated.numel() > 0) return true;
    accumulated.add_(local);
    if (tie_ != nullptr) at::Tensor(local).zero_();  // the plan may add to it: to what is not handed over yet
    return true;
  }
  if (HoldsMemoryOf(local)) {
    PyErr_SetString(PyExc_RuntimeError,
                    "the gradient was dropped, but the plan adds to it: its program has no zero_grad here");
    return false;
  }
  if (CanReuseGrad()) {
    c10::TensorImpl* reused = THPVariable_Unpack(grad_local_object_).unsafeGetTensorImpl();
    reused->set_storage_keep_dtype(local.storage());
    reused->set_storage_offset(local.storage_offset());
  } else {
    // No view in autograd's eyes: it would hold the buffer of this step, whatever memory it is given later.
    PyRef local_object = PyRef::Steal(THPVariable_Wrap(local.variable_data()));
    grad_object_ =
        local_object ? PyRef::Steal(PyObject_CallOneArg(make_grad_.get(), local_object.get())) : PyRef();
    if (!grad_object_) return false;
    PyRef inner = LocalTensor(grad_object_.get());
    if (!inner) return false;
    grad_local_object_ = inner.get();  // kept alive by grad_object_
  }
  shard().mutable_grad() = THPVariable_Unpack(grad_object_.get());
  return true;
}

bool PythonParameter::HasGradHooks() const {
  return torch::autograd::impl::post_acc_grad_hooks(shard()) != nullptr;
}

void PythonParameter::RunGradHooks() const {
  try {
    (*torch::autograd::impl::post_acc_grad_hooks(shard()))(shard());
  } catch (python_error& error) {
    error.persist();  // takes the error's words; without it what() has none
    throw;
  }
}

at::Tensor PythonParameter::LocalGradient() const {
  if (!unsharded_.grad().defined() || !local_grad_) return unsharded_.grad();
  const InsidePython guards;
  at::Tensor local = Gradient();
  if (!local.defined()) OrThrow(PythonError("taking the local part of a DTensor gradient"));
  return local;
}

}  // namespace shardplan::python
