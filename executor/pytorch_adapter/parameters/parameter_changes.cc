// SPDX-License-Identifier: Apache-2.0
#include "parameters/parameter_changes.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <stdexcept>

#include "binding/python_error.h"

namespace shardplan::python {

std::string ParameterText(const Plan& plan, UnitId unit, std::int32_t parameter) {
  return fmt::format("parameter {}", plan.units[unit].parameters[parameter].fqn);
}

// A parameter of the plan that is `found`, but for one: its name, "" if there is none.
std::string ParameterChanges::OwnerOf(PyObject* found, std::size_t but_unit,
                                      std::size_t but_parameter) const {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      const bool itself = unit == but_unit && i == but_parameter;
      if (!itself && units_[unit].parameters[i].IsShard(found)) return plan_.units[unit].parameters[i].fqn;
    }
  }
  return {};
}

// Ties are decided when a plan is made: which unit gathers what, and where gradients are added up.
void ParameterChanges::CheckTies(PyObject* found, std::size_t unit, std::size_t parameter) const {
  const std::string name =
      ParameterText(plan_, static_cast<UnitId>(unit), static_cast<std::int32_t>(parameter));
  if (const std::string other = OwnerOf(found, unit, parameter); !other.empty()) {
    throw std::runtime_error(fmt::format(
        "shardplan: {} was tied to {} after shardplan.torch.apply: tie them before it, and trace and "
        "plan the model again (each unit trains a copy of its own of what is tied across units)",
        name, other));
  }
  if (!units_[unit].parameters[parameter].SlotsAgree()) {
    throw std::runtime_error(
        fmt::format("shardplan: {} is tied with {}, and one of them was given another parameter after "
                    "shardplan.torch.apply: give it to both, or untie them before it, and trace and plan the "
                    "model again",
                    name, fmt::join(plan_.units[unit].parameters[parameter].shared_with, ", ")));
  }
}

void ParameterChanges::Adopt() {
  const HoldGil gil;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].unsharded) continue;  // its modules hold others, rightly
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      ModelParameter& parameter = units_[unit].parameters[i];
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

std::optional<bool> ParameterChanges::RequiresGrad(std::size_t unit, std::size_t parameter) const {
  if (const FlatUnit* flat = units_[unit].flat.get()) {
    return flat->RequiresGrad(static_cast<std::int32_t>(parameter));
  }
  return units_[unit].parameters[parameter].shard().requires_grad();
}

std::string ParameterChanges::RequiresGradChange() const {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < plan_.units[unit].parameters.size(); ++i) {
      const bool expected = plan_.units[unit].parameters[i].requires_grad;
      if (RequiresGrad(unit, i).value_or(expected) == expected) continue;
      return fmt::format(
          "{}: requires_grad expected {}, found {}: it was changed after shardplan.torch.apply. Set it "
          "before, and trace and plan the model again, or apply the plan with on_deviation=\"replan\" (not "
          "with flat parameters), or leave it as it was and keep the parameter out of the optimizer",
          ParameterText(plan_, static_cast<UnitId>(unit), static_cast<std::int32_t>(i)), expected, !expected);
    }
  }
  return {};
}

}  // namespace shardplan::python
