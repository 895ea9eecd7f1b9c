// SPDX-License-Identifier: Apache-2.0
#include "training/binding/parameters/parameter_changes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <stdexcept>

#include "training/binding/python_error.h"

namespace shardplan::python {

void ParameterChanges::Add(UnitId unit, PythonParameter& parameter) {
  for (const auto& of_unit : parameters_) {
    for (PythonParameter* other : of_unit) {
      if (parameter.HasShardOf(*other)) parameter.Tie(*other);
    }
  }
  parameters_[unit].push_back(&parameter);
}

// A parameter of the plan that is `found`, but for one and those tied to it since before the first step: its
// name, "" if there is none.
std::string ParameterChanges::OwnerOf(PyObject* found, const PythonParameter& but) const {
  for (std::size_t unit = 0; unit < parameters_.size(); ++unit) {
    for (std::size_t i = 0; i < parameters_[unit].size(); ++i) {
      const PythonParameter& other = *parameters_[unit][i];
      if (&other != &but && !but.IsTiedWith(other) && other.IsShard(found))
        return plan_.units[unit].parameters[i].fqn;
    }
  }
  return {};
}

// Ties are decided when a plan is made: which unit gathers what, and where gradients are added up.
void ParameterChanges::CheckTies(PyObject* found, std::size_t unit, std::size_t parameter) const {
  const std::string name =
      executor::ParameterText(plan_, static_cast<UnitId>(unit), static_cast<std::int32_t>(parameter));
  if (const std::string other = OwnerOf(found, *parameters_[unit][parameter]); !other.empty()) {
    throw std::runtime_error(fmt::format(
        "shardplan: {} was tied to {} after shardplan.torch.apply: tie them before it, and trace and "
        "plan the model again (each unit trains a copy of its own of what is tied across units)",
        name, other));
  }
  if (!parameters_[unit][parameter]->SlotsAgree()) {
    throw std::runtime_error(
        fmt::format("shardplan: {} is tied with {}, and one of them was given another parameter after "
                    "shardplan.torch.apply: give it to both, or untie them before it, and trace and plan the "
                    "model again",
                    name, fmt::join(plan_.units[unit].parameters[parameter].shared_with, ", ")));
  }
}

void ParameterChanges::Adopt() {
  const HoldGil gil;
  for (std::size_t unit = 0; unit < parameters_.size(); ++unit) {
    if (units_[unit].unsharded) continue;  // its modules hold others, rightly
    for (std::size_t i = 0; i < parameters_[unit].size(); ++i) {
      PythonParameter& parameter = *parameters_[unit][i];
      PyObject* found = parameter.Replacement();
      if (found == nullptr) [[likely]] {
        continue;
      }
      CheckTies(found, unit, i);
      const PyRef adopted = PyRef::Steal(PyObject_CallFunction(adopt_.get(), "nnO", unit, i, found));
      if (!adopted) Throw(PythonError("taking over a parameter").error());
      parameter.Adopt(PyRef::Borrow(found));
    }
  }
}

}  // namespace shardplan::python
