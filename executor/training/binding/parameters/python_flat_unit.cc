// SPDX-License-Identifier: Apache-2.0
#include "training/binding/parameters/python_flat_unit.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/python_variable.h>

#include <numeric>
#include <utility>

#include "training/binding/python_error.h"

namespace shardplan::python {
namespace {

bool SameStorage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

std::int64_t Product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// `from`, of another stream, may go while the copy is under way.
void CopyOnCurrentStream(at::Tensor& to, const at::Tensor& from) {
  to.copy_(from);
  if (!from.is_cuda()) return;
  const c10::impl::VirtualGuardImpl device(from.device().type());
  from.record_stream(device.getStream(from.device()));
}

// module.name = tensor, whatever is registered under that name: first deleted, as nn.Module lets no plain
// tensor replace a parameter. (Classes with a __setattr__ of their own, RNNs, keep lists of their weights.)
bool AssignSlowly(const ParameterSlot& slot, PyObject* tensor) {
  PyObject* module = PyWeakref_GetObject(slot.module.get());
  if (module == nullptr) return false;
  if (module == Py_None) return true;
  const int present = PyObject_HasAttr(module, slot.name.get());
  if (present != 0 && PyObject_DelAttr(module, slot.name.get()) != 0) return false;
  return PyObject_SetAttr(module, slot.name.get(), tensor) == 0;
}

// The slot's dict (module._parameters; module.__dict__ where it has none) holds `tensor`.
bool Assign(const ParameterSlot& slot, PyObject* tensor) {
  if (!slot.fast && !AssignSlowly(slot, tensor)) return false;
  if (slot.dict) return PyDict_SetItem(slot.dict.get(), slot.name.get(), tensor) == 0;
  PyObject* module = PyWeakref_GetObject(slot.module.get());
  if (module == nullptr) return false;
  if (module == Py_None || !slot.fast) return true;
  const PyRef own = PyRef::Steal(PyObject_GenericGetDict(module, nullptr));
  return own && PyDict_SetItem(own.get(), slot.name.get(), tensor) == 0;
}

}  // namespace

PythonFlatUnit::PythonFlatUnit(Options options, at::Tensor shard, std::vector<VisibleParameter> visible,
                               std::vector<std::vector<ParameterSlot>> views,
                               std::shared_ptr<executor::FlatGradient> gradient)
    : FlatUnit(options, std::move(gradient)),
      shard_(std::move(shard)),
      visible_(std::move(visible)),
      view_slots_(std::move(views)) {}

Status PythonFlatUnit::BindViews(std::vector<at::Tensor> views, bool track) {
  if (track && options().trains) gradient().Track(views);
  views_.clear();
  for (const at::Tensor& view : views) views_.push_back(PyRef::Steal(THPVariable_Wrap(view)));
  return BindViewsAgain();
}

Status PythonFlatUnit::BindViewsAgain() {
  for (std::size_t i = 0; i < views_.size(); ++i) {
    for (const ParameterSlot& slot : view_slots_[i]) {
      if (!views_[i] || !Assign(slot, views_[i].get())) return PythonError("binding an unsharded parameter");
    }
  }
  views_bound_ = true;
  return {};
}

Status PythonFlatUnit::BindSharded() {
  views_bound_ = false;
  if (!options().original_parameters) return {};
  for (const VisibleParameter& visible : visible_) {
    for (const ParameterSlot& slot : visible.slots) {
      if (!Assign(slot, visible.object.get())) return PythonError("binding a sharded parameter");
    }
  }
  return {};
}

at::Tensor PythonFlatUnit::Slice(const at::Tensor& whole, const VisibleParameter& visible) const {
  return whole.narrow(0, visible.offset, Product(visible.shape)).view(visible.shape);
}

Status PythonFlatUnit::WriteBack(const Issue& issue) {
  const at::NoGradGuard no_grad;
  if (views_bound_ && options().original_parameters) return {};
  for (VisibleParameter& visible : visible_) {
    if (Status status = CheckDtype(visible); !status) return status;
    if (!visible.in_shard) continue;
    if (Status status = WriteBackParameter(visible, issue); !status) return status;
    if (!published_.defined()) continue;
    if (Status status = WriteBackGradient(visible, issue); !status) return status;
  }
  return {};
}

// Checks every parameter, whether or not this rank has a part of it: all ranks raise, or none.
Status PythonFlatUnit::CheckDtype(const VisibleParameter& visible) const {
  const at::ScalarType found = THPVariable_Unpack(visible.object.get()).scalar_type();
  if (found == shard_.scalar_type()) return {};
  return MakeError(
      ErrorCode::kNegative,
      fmt::format(
          "parameter {} was changed after shardplan.torch.apply: dtype expected {}, found {}. Convert the "
          "model before, and trace and plan it again",
          visible.fqn, c10::toString(shard_.scalar_type()), c10::toString(found)));
}

// Modules that hold another parameter than ours: it takes our one's place.
Status PythonFlatUnit::WriteBackParameter(VisibleParameter& visible, const Issue& issue) {
  PyObject* found = nullptr;
  for (const ParameterSlot& slot : visible.slots) {
    PyObject* held = PyDict_GetItem(slot.dict.get(), slot.name.get());
    if (held == nullptr) return {};  // deregistered by the user
    if (found != nullptr && found != held) {
      return MakeError(
          ErrorCode::kNegative,
          fmt::format(
              "parameter {} is tied, and one of its modules was given another parameter: "
              "give it to all of them, or untie them before shardplan.torch.apply and plan the model again",
              visible.fqn));
    }
    found = held;
  }
  if (found != visible.object.get()) {
    if (!THPVariable_Check(found)) {
      return MakeError(ErrorCode::kNegative,
                       fmt::format("parameter {} was replaced by something that is no tensor", visible.fqn));
    }
    visible.object = PyRef::Borrow(found);
  }
  at::Tensor tensor = THPVariable_Unpack(visible.object.get());
  if (SameStorage(tensor, shard_)) return {};
  if (tensor.sizes() != at::IntArrayRef(visible.shape)) {
    return MakeError(
        ErrorCode::kNegative,
        fmt::format("parameter {} was replaced by one of another shape: expected [{}], found [{}]",
                    visible.fqn, fmt::join(visible.shape, ", "), fmt::join(tensor.sizes(), ", ")));
  }
  at::Tensor slice = Slice(shard_, visible);
  const Status copied = issue([&] { CopyOnCurrentStream(slice, tensor.detach()); });
  tensor.set_data(slice);
  return copied;
}

// The plan adds to the gradient that it made before; the user's .grad says what that is now.
Status PythonFlatUnit::WriteBackGradient(const VisibleParameter& visible, const Issue& issue) {
  const at::Tensor tensor = THPVariable_Unpack(visible.object.get());
  if (!tensor.requires_grad()) return {};
  at::Tensor slice = Slice(published_, visible);
  if (!tensor.grad().defined()) return issue([&] { slice.zero_(); });
  if (SameStorage(tensor.grad(), published_)) return {};
  const Status copied = issue([&] { CopyOnCurrentStream(slice, tensor.grad().view(visible.shape)); });
  if (tensor.grad().scalar_type() == slice.scalar_type()) tensor.mutable_grad() = slice;
  return copied;
}

std::optional<bool> PythonFlatUnit::RequiresGrad(std::int32_t parameter) const {
  if (!options().original_parameters) return std::nullopt;
  return THPVariable_Unpack(visible_[parameter].object.get()).requires_grad();
}

Status PythonFlatUnit::PublishGradient(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  const bool continued = published_.defined();
  published_ = local;
  for (const VisibleParameter& visible : visible_) {
    const at::Tensor tensor = THPVariable_Unpack(visible.object.get());
    if (!visible.in_shard || !tensor.requires_grad()) continue;
    const at::Tensor slice = Slice(local, visible);
    at::Tensor& grad = tensor.mutable_grad();
    const bool converts = options().grad_dtype && *options().grad_dtype != slice.scalar_type();
    if (grad.defined() && SameStorage(grad, local) && !converts) continue;
    if (!grad.defined() || continued) {
      grad = slice;
    } else if (grad.scalar_type() == slice.scalar_type()) {
      grad.add_(slice);  // the user kept a gradient that the plan let go of
    } else {
      grad = grad.to(slice.scalar_type()).add_(slice);
    }
    if (converts) grad = grad.to(*options().grad_dtype);
  }
  return {};
}

void PythonFlatUnit::PublishZeros() {
  if (!options().zeros_on_host) return;
  for (const VisibleParameter& visible : visible_) {
    at::Tensor& grad = THPVariable_Unpack(visible.object.get()).mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(shard_);
  }
}

void PythonFlatUnit::DropGradient() {
  gradient().Clear();
  ForgetGradient();
  for (const VisibleParameter& visible : visible_) {
    THPVariable_Unpack(visible.object.get()).mutable_grad() = at::Tensor();
  }
}

Status PythonFlatUnit::StepInBackward(std::int32_t parameter) {
  const PyRef& object = visible_[parameter].object;
  const at::Tensor tensor = THPVariable_Unpack(object.get());
  if (!tensor.grad().defined()) return {};
  const PyRef optimizers = PyRef::Steal(PyObject_GetAttrString(object.get(), "_in_backward_optimizers"));
  if (!optimizers) {
    PyErr_Clear();
    return MakeError(
        ErrorCode::kNegative,
        fmt::format("the plan steps parameter {} in the backward, but it has no optimizer of its own",
                    visible_[parameter].fqn));
  }
  const PyRef iterator = PyRef::Steal(PyObject_GetIter(optimizers.get()));
  while (iterator) {
    const PyRef optimizer = PyRef::Steal(PyIter_Next(iterator.get()));
    if (!optimizer) break;
    const PyRef stepped = PyRef::Steal(PyObject_CallMethod(optimizer.get(), "step", nullptr));
    if (!stepped) break;
  }
  if (PyErr_Occurred() != nullptr) return PythonError("an optimizer in the backward");
  tensor.mutable_grad() = at::Tensor();
  return {};
}

}  // namespace shardplan::python
