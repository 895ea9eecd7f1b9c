// SPDX-License-Identifier: Apache-2.0
// The runtime of a model in Python: what it asks Python objects, and what they ask of it.
#pragma once

#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "training/binding/custom_comm.h"
#include "training/binding/parameters/extensions.h"
#include "training/binding/parameters/parameter_changes.h"
#include "training/binding/parameters/python_flat_unit.h"
#include "training/binding/py_ref.h"
#include "training/runtime/runtime.h"

namespace shardplan::python {

// The hooks hand what members throw on to Python as RuntimeError. The GIL is held in all functions but those
// of executor::Model.
class PythonRuntime final : public executor::Runtime {
 public:
  // groups: by CommunicatorId, for evaluation.
  PythonRuntime(std::shared_ptr<const Plan> plan, std::int64_t rank,
                std::unique_ptr<executor::TorchDevice> device, std::unique_ptr<CustomCollectives> collectives,
                std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups,
                std::shared_ptr<executor::DeviationConsensus> consensus);
  ~PythonRuntime() override;

  void AddPythonParameter(UnitId unit, std::unique_ptr<PythonParameter> parameter);
  // ... with an all-gather extension; see Extensions::Add. Its AddPythonParameter has a placeholder of the
  // whole one.
  void AddExtension(UnitId unit, std::int32_t parameter, PyRef inputs, PyRef finish);
  // In place of SetShards and AddPythonParameter, after SetFlatShard.
  void AddFlatUnit(UnitId unit, executor::FlatUnit::Options options, std::vector<VisibleParameter> visible,
                   std::vector<std::vector<ParameterSlot>> views);

  void SetCustomCollective(UnitId unit, CollectiveKind kind, PyRef comm);
  ParameterChanges& parameter_changes() { return changes_; }

  // The hook of another plan, if a step begins that is to follow it: because the user froze or unfroze
  // parameters (OnRequiresGradChange), or because of AtNextStep or AtNextForward. It is the pre-forward hook
  // of the entered module in that plan. Else null. entered: module, args, kwargs.
  PyRef HookOfNextPlan(UnitId unit, PyObject* const* entered);
  // on_left(module): the pre-forward hook of a module in the plan that is followed instead of this one.
  void OnLeft(PyRef on_left) { on_left_ = std::move(on_left); }
  // on_change(unit, what was changed, in words): makes the model follow a plan for parameters that require
  // gradients as they do now, and returns the unit's pre-forward hook in it.
  void OnRequiresGradChange(PyRef on_change) { on_requires_grad_change_ = std::move(on_change); }
  // Once, where the next step begins: on_begin(unit, module, args, kwargs) may make the model follow another
  // plan; it returns the module's pre-forward hook in that, or None.
  void AtNextStep(PyRef on_begin) { at_next_step_ = std::move(on_begin); }
  // ... where the next step or evaluation begins, before AtNextStep.
  void AtNextForward(PyRef on_begin) { at_next_forward_ = std::move(on_begin); }
  // left: the model follows another runtime from now on.
  void Leave(bool left) {
    left_ = left;
    if (left) at_next_step_ = at_next_forward_ = {};
  }
  bool is_left() const { return left_; }
  // explain(unit): why the model may not pass a point of the unit, for people; "": unknown.
  void ExplainDeviations(PyRef explain) { explain_ = std::move(explain); }

  // activations: take(unit, host) -> the storages that go to these parts in host memory, as tensors of
  // bytes; drop(unit, host) when they are copied; give(unit, parts) when they are back.
  void SetActivations(PyRef activations) { activations_ = std::move(activations); }

  // ---- executor::Model ----
  Status TakeActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Status DropActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Status GiveActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Result<bool> MoveExtended(BufferId src, BufferId dst, StreamId stream) override;
  Status BindUnsharded(UnitId unit, BufferId buffer) override;

 private:
  void AdoptChanges() override { changes_.Adopt(); }
  std::string ExplainDeviation(UnitId unit) override;
  std::vector<at::Tensor> PartsOf(BufferId buffer);
  // Calls what SetActivations was given. kBadInput: it has raised.
  Status CallActivations(std::string_view what, const auto& call);
  BufferId HostCopyOf(BufferId activation) const;
  PyRef HookAfterLastStep(PyObject* module);
  // Calls on_begin, if there is one, and forgets it: the hook that it returns, or null.
  PyRef HookBy(PyRef& on_begin, UnitId unit, PyObject* const* entered);

  Extensions extensions_;
  ParameterChanges changes_;
  std::vector<std::vector<PythonParameter*>> parameters_;  // by unit
  PyRef on_requires_grad_change_;                          // null: such a change is an error
  PyRef at_next_step_;
  PyRef at_next_forward_;
  PyRef on_left_;
  bool left_ = false;
  PyRef explain_;
  PyRef activations_;  // null: the plan moves none
};

}  // namespace shardplan::python
