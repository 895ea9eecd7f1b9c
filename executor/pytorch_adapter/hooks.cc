// SPDX-License-Identifier: Apache-2.0
#include "hooks.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <utility>
#include <vector>

#include "binding/tensor_tree.h"
#include "inputs_done.h"
#include "post_backward.h"
#include "profiler_ranges.h"
#include "runtime.h"

namespace shardplan::python {
namespace {

constexpr const char* kCapsuleName = "shardplan.unit_hooks";

struct UnitHooks {
  std::shared_ptr<Runtime> runtime;
  HookOptions options;
};

UnitHooks& FromCapsule(PyObject* capsule) {
  return *static_cast<UnitHooks*>(PyCapsule_GetPointer(capsule, kCapsuleName));
}

// Casts floating-point tensors; true if any changed.
bool CastFloatingPoint(std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  bool changed = false;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype) continue;
    tensor = tensor.to(dtype);
    changed = true;
  }
  return changed;
}

// True if any was elsewhere.
bool MoveTo(c10::Device device, std::vector<at::Tensor>& tensors) {
  bool changed = false;
  for (at::Tensor& tensor : tensors) {
    if (tensor.device() == device) continue;
    tensor = tensor.to(device);
    changed = true;
  }
  return changed;
}

std::vector<std::size_t> NeedingGrad(const std::vector<at::Tensor>& tensors) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad()) indices.push_back(i);
  }
  return indices;
}

// A frozen flat unit is done with the gradients of its inputs.
void WatchInputs(const UnitHooks& hooks, std::vector<at::Tensor> tensors) {
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.requires_grad(); });
  WhenGradientsDone(tensors,
                    [runtime = hooks.runtime, unit = hooks.options.unit] { runtime->PostBackward(unit); });
}

// module.training. False with a Python error set on failure.
bool IsTraining(PyObject* module) {
  const PyRef training = PyRef::Steal(PyObject_GetAttrString(module, "training"));
  return training && PyObject_IsTrue(training.get()) == 1;
}

// (args, kwargs) with the unit's changes, or a new reference to None when nothing changed. registers: the
// unit's post-backward is theirs.
PyObject* PreparedInputs(UnitHooks& hooks, bool registers, bool full_precision, PyObject* args,
                         PyObject* kwargs) {
  const bool casts = hooks.options.input_dtype && !full_precision;
  FlatUnit* flat = hooks.runtime->Flat(hooks.options.unit);
  const bool grad = hooks.options.unit >= 0 && at::GradMode::is_enabled();
  const bool insert_node = grad && registers && flat == nullptr;
  const bool watch = grad && flat != nullptr && !flat->options().trains && flat->ClaimInputHooks();
  const c10::Device device = hooks.runtime->torch_device();
  const bool moves = !device.is_cpu() && hooks.runtime->IsOutermost(hooks.options.unit);
  if (!insert_node && !watch && !casts && !moves) Py_RETURN_NONE;
  PyRef cast_args, cast_kwargs;
  if (casts && (HasOtherContainers(args) || HasOtherContainers(kwargs))) {
    const ProfilerRange range("FSDP::cast_forward_inputs");
    cast_args = CastAsPyTorch(args, *hooks.options.input_dtype);
    cast_kwargs = cast_args ? CastAsPyTorch(kwargs, *hooks.options.input_dtype) : PyRef();
    if (!cast_kwargs) return nullptr;
    args = cast_args.get();
    kwargs = cast_kwargs.get();
  }
  std::vector<at::Tensor> tensors;
  if (!CollectTensors(args, tensors)) return nullptr;
  const std::size_t positional = tensors.size();
  if (!CollectTensors(kwargs, tensors)) return nullptr;
  bool changed = static_cast<bool>(cast_args);
  if (moves) {
    const ProfilerRange range("FSDP::inputs_to_device");
    changed = MoveTo(device, tensors) || changed;
  }
  if (casts && !cast_args) {
    const ProfilerRange range("FSDP::cast_forward_inputs");
    changed = CastFloatingPoint(tensors, *hooks.options.input_dtype) || changed;
  }
  if (insert_node) {
    const std::vector<std::size_t> indices = NeedingGrad(tensors);
    if (!indices.empty()) {
      InsertPostBackward(hooks.runtime, hooks.options.unit, tensors, indices);
      changed = true;
    }
  }
  if (watch) WatchInputs(hooks, tensors);
  if (!changed) Py_RETURN_NONE;
  PyRef new_args = ReplaceTensors(args, {tensors.begin(), tensors.begin() + positional});
  PyRef new_kwargs = ReplaceTensors(kwargs, {tensors.begin() + positional, tensors.end()});
  if (!new_args || !new_kwargs) return nullptr;
  return PyTuple_Pack(2, new_args.get(), new_kwargs.get());
}

// (module, args, kwargs) -> None or (args, kwargs)
PyObject* PreForward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  UnitHooks& hooks = FromCapsule(self);
  if (hooks.runtime->is_left()) Py_RETURN_NONE;  // by a hook in front of it, of the same call
  if (const PyRef next = hooks.runtime->HookOfNextPlan(hooks.options.unit, arguments)) [[unlikely]] {
    return PyObject_Vectorcall(next.get(), arguments, count, nullptr);
  }
  // The modules of a group are entered one after the other, in one forward of the unit.
  hooks.runtime->GiveUpInterrupted(hooks.options.modules.size() > 1 ? -1 : hooks.options.unit);
  const ModuleGroups::Entered entered =
      hooks.runtime->groups().Enter(hooks.options.unit, hooks.options.modules);
  if (!entered.runs_hook) Py_RETURN_NONE;
  if (hooks.runtime->IsRecomputing(hooks.options.unit)) {
    hooks.runtime->Recompute(TriggerKind::kPreForward, hooks.options.unit);
    Py_RETURN_NONE;
  }
  const bool full_precision = hooks.options.full_precision_in_eval && !IsTraining(arguments[0]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  hooks.runtime->PreForward(hooks.options.unit, full_precision);
  return PreparedInputs(hooks, entered.registers_inputs, full_precision, arguments[1], arguments[2]);
  END_HANDLE_TH_ERRORS
}

// The output in its dtype, or a new reference to None when nothing changed. tensors: the output's.
PyObject* CastOutput(const UnitHooks& hooks, PyObject* output, std::vector<at::Tensor>& tensors) {
  if (!hooks.options.output_dtype) Py_RETURN_NONE;
  const ProfilerRange range("FSDP::cast_forward_outputs");
  if (HasOtherContainers(output)) return CastAsPyTorch(output, *hooks.options.output_dtype).release();
  if (!CastFloatingPoint(tensors, *hooks.options.output_dtype)) Py_RETURN_NONE;
  return ReplaceTensors(output, tensors).release();
}

void HookPreBackward(const UnitHooks& hooks, UnitId unit, const std::vector<at::Tensor>& tensors) {
  const std::int64_t run = hooks.runtime->Runs(unit);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    tensor.register_hook(
        [runtime = hooks.runtime, unit, run](const at::TensorBase&) { runtime->PreBackward(unit, run); });
  }
}

// (module, args, output) -> None or the output to return instead
PyObject* PostForward(PyObject* self, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  UnitHooks& hooks = FromCapsule(self);
  const UnitId unit = hooks.options.unit;
  Runtime& runtime = *hooks.runtime;
  PyObject* output = arguments[2];
  std::vector<at::Tensor> tensors;
  if (!runtime.groups().Leave(unit, hooks.options.modules, arguments[0])) {
    if (!runtime.groups().each_is_cast() || !hooks.options.output_dtype) Py_RETURN_NONE;
    if (!CollectTensors(output, tensors)) return nullptr;
    return CastOutput(hooks, output, tensors);
  }
  if (runtime.IsRecomputing(unit)) {
    runtime.Recompute(TriggerKind::kPostForward, unit);
    Py_RETURN_NONE;
  }
  const std::vector<UnitId> completed = runtime.PostForward(unit);
  const bool grad = at::GradMode::is_enabled();
  if (!grad && !hooks.options.output_dtype) Py_RETURN_NONE;
  if (!CollectTensors(output, tensors)) return nullptr;
  if (grad) {
    HookPreBackward(hooks, unit, tensors);
    for (const UnitId other : completed) HookPreBackward(hooks, other, tensors);
  }
  return CastOutput(hooks, output, tensors);
  END_HANDLE_TH_ERRORS
}

// How METH_FASTCALL functions are put into a PyMethodDef.
PyCFunction AsMethod(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef pre_forward_method = {"shardplan_pre_forward", AsMethod(&PreForward), METH_FASTCALL, nullptr};
PyMethodDef post_forward_method = {"shardplan_post_forward", AsMethod(&PostForward), METH_FASTCALL, nullptr};

}  // namespace

ModuleHooks MakeModuleHooks(std::shared_ptr<Runtime> runtime, const HookOptions& options) {
  auto hooks = std::make_unique<UnitHooks>(UnitHooks{std::move(runtime), options});
  PyRef capsule = PyRef::Steal(PyCapsule_New(hooks.get(), kCapsuleName, [](PyObject* object) {
    delete static_cast<UnitHooks*>(PyCapsule_GetPointer(object, kCapsuleName));
  }));
  if (!capsule) return {};
  hooks.release();  // the capsule owns it now
  return {PyRef::Steal(PyCFunction_NewEx(&pre_forward_method, capsule.get(), nullptr)),
          PyRef::Steal(PyCFunction_NewEx(&post_forward_method, capsule.get(), nullptr))};
}

}  // namespace shardplan::python
