#include "parameter_changes.h"

#include <fmt/format.h>

#include <stdexcept>

#include "python_error.h"

namespace shardplan::python {

std::string ParameterText(const Plan& plan, UnitId unit, std::int32_t parameter) {
  return fmt::format("parameter {}", plan.units[unit].parameters[parameter].fqn);
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
      const PyRef adopted = PyRef::Steal(PyObject_CallFunction(adopt_.get(), "nnO", unit, i, found));
      if (!adopted) Throw(PythonError("a parameter").error());
      parameter.Adopt(PyRef::Borrow(found));
    }
  }
}

void ParameterChanges::CheckRequiresGrad() const {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (std::size_t i = 0; i < units_[unit].parameters.size(); ++i) {
      const bool expected = plan_.units[unit].parameters[i].requires_grad;
      if (units_[unit].parameters[i].shard().requires_grad() == expected) continue;
      throw std::runtime_error(
          fmt::format("shardplan: {}: requires_grad expected {}, found {}: it was changed after "
                      "shardplan.torch.apply; plan the model as it is now",
                      ParameterText(plan_, static_cast<UnitId>(unit), static_cast<std::int32_t>(i)), expected,
                      !expected));
    }
  }
}

}  // namespace shardplan::python
