// SPDX-License-Identifier: Apache-2.0
#include "training/binding/hooks.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <utility>
#include <vector>

#include "training/binding/python_runtime.h"
#include "training/binding/tensor_tree.h"
#include "training/profiler_ranges.h"

namespace shardplan::python {
namespace {

using executor::ProfilerRange;
using executor::UnitHooks;

constexpr const char* kCapsuleName = "shardplan.unit_hooks";

struct PythonHooks {
  std::shared_ptr<PythonRuntime> runtime;
  UnitHooks unit;
};

PythonHooks& FromCapsule(PyObject* capsule) {
  return *static_cast<PythonHooks*>(PyCapsule_GetPointer(capsule, kCapsuleName));
}

// module.training. False with a Python error set on failure.
bool IsTraining(PyObject* module) {
  const PyRef training = PyRef::Steal(PyObject_GetAttrString(module, "training"));
  return training && PyObject_IsTrue(training.get()) == 1;
}

// (args, kwargs) with the unit's changes, or a new reference to None when nothing changed.
PyObject* PreparedInputs(UnitHooks& unit, const UnitHooks::InputWork& work, PyObject* args,
                         PyObject* kwargs) {
  if (!work.any()) Py_RETURN_NONE;
  PyRef cast_args, cast_kwargs;
  if (work.casts && (HasOtherContainers(args) || HasOtherContainers(kwargs))) {
    const ProfilerRange range("FSDP::cast_forward_inputs");
    cast_args = CastAsPyTorch(args, *unit.options().input_dtype);
    cast_kwargs = cast_args ? CastAsPyTorch(kwargs, *unit.options().input_dtype) : PyRef();
    if (!cast_kwargs) return nullptr;
    args = cast_args.get();
    kwargs = cast_kwargs.get();
  }
  std::vector<at::Tensor> tensors;
  if (!CollectTensors(args, tensors)) return nullptr;
  const std::size_t positional = tensors.size();
  if (!CollectTensors(kwargs, tensors)) return nullptr;
  if (!unit.Prepare(work, static_cast<bool>(cast_args), tensors)) Py_RETURN_NONE;
  PyRef new_args = ReplaceTensors(args, {tensors.begin(), tensors.begin() + positional});
  PyRef new_kwargs = ReplaceTensors(kwargs, {tensors.begin() + positional, tensors.end()});
  if (!new_args || !new_kwargs) return nullptr;
  return PyTuple_Pack(2, new_args.get(), new_kwargs.get());
}

// (module, args, kwargs) -> None or (args, kwargs)
PyObject* PreForward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PythonHooks& hooks = FromCapsule(self);
  const executor::HookOptions& options = hooks.unit.options();
  if (hooks.runtime->is_left()) Py_RETURN_NONE;  // by a hook in front of it, of the same call
  if (const PyRef next = hooks.runtime->HookOfNextPlan(options.unit, arguments)) [[unlikely]] {
    return PyObject_Vectorcall(next.get(), arguments, count, nullptr);
  }
  const bool full_precision = options.full_precision_in_eval && !IsTraining(arguments[0]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PreparedInputs(hooks.unit, hooks.unit.PreForward(arguments[0], full_precision), arguments[1],
                        arguments[2]);
  END_HANDLE_TH_ERRORS
}

// The output in its dtype, or a new reference to None when nothing changed. tensors: the output's.
PyObject* CastOutput(at::ScalarType dtype, PyObject* output, std::vector<at::Tensor>& tensors) {
  const ProfilerRange range("FSDP::cast_forward_outputs");
  if (HasOtherContainers(output)) return CastAsPyTorch(output, dtype).release();
  if (!executor::CastFloatingPoint(tensors, dtype)) Py_RETURN_NONE;
  return ReplaceTensors(output, tensors).release();
}

// (module, args, output) -> None or the output to return instead
PyObject* PostForward(PyObject* self, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  UnitHooks& unit = FromCapsule(self).unit;
  const UnitHooks::OutputWork work = unit.PostForward(arguments[0]);
  if (!work.any()) Py_RETURN_NONE;
  PyObject* output = arguments[2];
  std::vector<at::Tensor> tensors;
  if (!CollectTensors(output, tensors)) return nullptr;
  unit.HookOutputs(work, tensors);
  if (!work.casts) Py_RETURN_NONE;
  return CastOutput(*unit.options().output_dtype, output, tensors);
  END_HANDLE_TH_ERRORS
}

// How METH_FASTCALL functions are put into a PyMethodDef.
PyCFunction AsMethod(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef pre_forward_method = {"shardplan_pre_forward", AsMethod(&PreForward), METH_FASTCALL, nullptr};
PyMethodDef post_forward_method = {"shardplan_post_forward", AsMethod(&PostForward), METH_FASTCALL, nullptr};

}  // namespace

ModuleHooks MakeModuleHooks(std::shared_ptr<PythonRuntime> runtime, const executor::HookOptions& options) {
  auto hooks = std::make_unique<PythonHooks>(PythonHooks{runtime, UnitHooks(runtime, options)});
  PyRef capsule = PyRef::Steal(PyCapsule_New(hooks.get(), kCapsuleName, [](PyObject* object) {
    delete static_cast<PythonHooks*>(PyCapsule_GetPointer(object, kCapsuleName));
  }));
  if (!capsule) return {};
  hooks.release();  // the capsule owns it now
  return {PyRef::Steal(PyCFunction_NewEx(&pre_forward_method, capsule.get(), nullptr)),
          PyRef::Steal(PyCFunction_NewEx(&post_forward_method, capsule.get(), nullptr))};
}

}  // namespace shardplan::python
