// SPDX-License-Identifier: Apache-2.0
#include "training/binding/python_runtime.h"

#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "training/binding/python_error.h"
#include "training/binding/python_lock.h"

namespace shardplan::python {
namespace py = pybind11;
namespace {

void Warn(const std::string& text) {
  const HoldGil gil;
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) Throw(PythonError("giving up a step").error());
}

executor::RuntimeOptions Options(std::shared_ptr<executor::DeviationConsensus> consensus) {
  return {
      .lock = &PythonLock(),
      .after_deviation = "Plan the step as it is trained, or apply the plan with on_deviation=\"replan\"",
      .after_freezing =
          "it was changed after shardplan.torch.apply. Set it before, and trace and plan the model again, "
          "or apply the plan with on_deviation=\"replan\" (not with flat parameters), or leave it as it "
          "was and keep the parameter out of the optimizer",
      .gives_up = "shardplan.torch.abandon_step",
      .warn = Warn,
      .consensus = std::move(consensus)};
}

}  // namespace

PythonRuntime::PythonRuntime(std::shared_ptr<const Plan> plan, std::int64_t rank,
                             std::unique_ptr<executor::TorchDevice> device,
                             std::unique_ptr<CustomCollectives> collectives,
                             std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
                             std::shared_ptr<executor::DeviationConsensus> consensus)
    : Runtime(std::move(plan), rank, std::move(device), std::move(collectives), std::move(groups),
              Options(std::move(consensus))),
      extensions_(this->plan(), this->device()),
      changes_(this->plan(), units()),
      parameters_(this->plan().units.size()) {}

// The last owner may be the autograd graph, which lets go without the GIL. Python objects need it to die;
// process groups must die without it: they wait for their threads, and these may want it.
PythonRuntime::~PythonRuntime() {
  if (Py_IsInitialized() == 0) return;
  const HoldGil gil;
  DropObjects();
  static_cast<CustomCollectives&>(collectives()).Clear();
  on_requires_grad_change_ = {};
  at_next_step_ = at_next_forward_ = {};
  on_left_ = {};
  explain_ = {};
  activations_ = {};
  changes_.Clear();
  extensions_.Clear();
  const ReleaseGil no_gil;
  DropExecution();
}

void PythonRuntime::AddPythonParameter(UnitId unit, std::unique_ptr<PythonParameter> parameter) {
  changes_.Add(unit, *parameter);
  parameters_[unit].push_back(parameter.get());
  AddParameter(unit, std::move(parameter));
}

void PythonRuntime::AddExtension(UnitId unit, std::int32_t parameter, PyRef inputs, PyRef finish) {
  extensions_.Add(unit, parameter, std::move(inputs), std::move(finish));
}

void PythonRuntime::AddFlatUnit(UnitId unit, executor::FlatUnit::Options options,
                                std::vector<VisibleParameter> visible,
                                std::vector<std::vector<ParameterSlot>> views) {
  options.zeros_on_host = HasZerosOnHost(unit, options);
  SetFlatUnit(unit, std::make_unique<PythonFlatUnit>(options, FlatShard(unit), std::move(visible),
                                                     std::move(views), MakeFlatGradient(unit)));
}

void PythonRuntime::SetCustomCollective(UnitId unit, CollectiveKind kind, PyRef comm) {
  static_cast<CustomCollectives&>(collectives()).Set(unit, kind, std::move(comm));
}

// A step on demand whose end no optimizer showed is over with a backward that has reduced everything.
PyRef PythonRuntime::HookAfterLastStep(PyObject* module) {
  if (!FollowsLastBackward()) return {};
  const auto self = shared_from_this();  // the model may let go of it
  EndFallback();
  if (!left_ || !on_left_) return {};
  PyRef hook = PyRef::Steal(PyObject_CallFunctionObjArgs(on_left_.get(), module, nullptr));
  if (!hook) throw python_error();
  return hook;
}

PyRef PythonRuntime::HookBy(PyRef& on_begin, UnitId unit, PyObject* const* entered) {
  const PyRef called = std::exchange(on_begin, PyRef());
  if (!called) return {};
  const auto self = shared_from_this();  // the model may let go of it
  PyRef hook = PyRef::Steal(PyObject_CallFunction(called.get(), "iOOO", static_cast<int>(unit), entered[0],
                                                  entered[1], entered[2]));
  if (!hook) throw python_error();
  return hook.get() == Py_None ? PyRef() : std::move(hook);
}

PyRef PythonRuntime::HookOfNextPlan(UnitId unit, PyObject* const* entered) {
  if (fallback().active()) [[unlikely]] {
    if (PyRef hook = HookAfterLastStep(entered[0])) return hook;
  }
  if (at_next_forward_ && BeginsForward()) [[unlikely]] {
    if (PyRef hook = HookBy(at_next_forward_, unit, entered)) return hook;
  }
  if ((!on_requires_grad_change_ && !at_next_step_) || !BeginsStep()) return {};
  if (PyRef hook = HookBy(at_next_step_, unit, entered)) return hook;
  if (!on_requires_grad_change_) return {};
  changes_.Adopt();
  const std::string change = RequiresGradChange();
  if (change.empty()) return {};
  const auto self = shared_from_this();  // the model lets go of it
  PyRef hook = PyRef::Steal(
      PyObject_CallFunction(on_requires_grad_change_.get(), "is", static_cast<int>(unit), change.c_str()));
  if (!hook) Throw(PythonError("planning again").error());
  return hook;
}

std::string PythonRuntime::ExplainDeviation(UnitId unit) {
  if (!explain_) return {};
  const PyRef text = PyRef::Steal(PyObject_CallFunction(explain_.get(), "i", static_cast<int>(unit)));
  const char* reason = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  if (reason == nullptr) Throw(PythonError("explaining a deviation").error());
  return reason;
}

Result<bool> PythonRuntime::MoveExtended(BufferId src, BufferId dst, StreamId stream) {
  Result<bool> moved = false;
  const Status ran = device().RunOn(std::max(stream, 0), [&] {
    const InsidePython guards;
    moved = extensions_.Move(src, dst);
  });
  return ran ? moved : std::unexpected(ran.error());
}

std::vector<at::Tensor> PythonRuntime::PartsOf(BufferId buffer) {
  std::vector<at::Tensor> parts;
  for (std::size_t p = 0; p < plan().buffers[buffer].parts_bytes.size(); ++p)
    parts.push_back(device().Part(buffer, static_cast<std::int32_t>(p)));
  return parts;
}

BufferId PythonRuntime::HostCopyOf(BufferId activation) const {
  const auto found = std::ranges::find_if(plan().buffers, [&](const Buffer& buffer) {
    return buffer.role == BufferRole::kActivationHost &&
           buffer.storages == plan().buffers[activation].storages;
  });
  SHARDPLAN_ASSERT(found != plan().buffers.end(), "a copy to the host has a place there");
  return static_cast<BufferId>(found - plan().buffers.begin());
}

Status PythonRuntime::CallActivations(std::string_view what, const auto& call) {
  const InsidePython guards;
  try {
    return call(py::handle(activations_.get()));
  } catch (const py::error_already_set& error) {
    return MakeError(ErrorCode::kBadInput, fmt::format("{}: {}", what, error.what()));
  }
}

Status PythonRuntime::TakeActivations(UnitId unit, BufferId buffer, std::int32_t) {
  return CallActivations("offloading activations", [&](py::handle activations) {
    const py::object taken = activations.attr("take")(unit, PartsOf(HostCopyOf(buffer)));
    return device().SetParts(buffer, taken.cast<std::vector<at::Tensor>>());
  });
}

Status PythonRuntime::DropActivations(UnitId unit, BufferId buffer, std::int32_t) {
  return CallActivations("offloading activations", [&](py::handle activations) {
    activations.attr("drop")(unit, PartsOf(HostCopyOf(buffer)));
    return Status{};
  });
}

Status PythonRuntime::GiveActivations(UnitId unit, BufferId buffer, std::int32_t) {
  return CallActivations("bringing activations back", [&](py::handle activations) {
    activations.attr("give")(unit, PartsOf(buffer));
    return Status{};
  });
}

Status PythonRuntime::BindUnsharded(UnitId unit, BufferId buffer) {
  if (extensions_.Has(unit)) {
    Status status;
    const Status ran = device().RunOn(0, [&] {
      const InsidePython guards;
      status = extensions_.Finish(unit, parameters_[unit]);
    });
    if (!ran || !status) return ran ? status : ran;
  }
  return Runtime::BindUnsharded(unit, buffer);
}

}  // namespace shardplan::python
