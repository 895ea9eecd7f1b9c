// SPDX-License-Identifier: Apache-2.0
// What the user changed on the sharded parameters since the step before.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parameters/unit_state.h"

namespace shardplan::python {

// Members throw std::runtime_error with a message for a person.
class ParameterChanges {
 public:
  // Both outlive this.
  ParameterChanges(const Plan& plan, std::vector<UnitState>& units) : plan_(plan), units_(units) {}

  // adopt(unit, parameter, found): the modules hold another sharded parameter than they were given, or there
  // is another tensor in it: makes it ours, or raises.
  void SetAdopt(PyRef adopt) { adopt_ = std::move(adopt); }
  // Takes over what the modules hold, of the units that are sharded. Takes the GIL.
  void Adopt();
  // The plan reduces gradients of the parameters that required them when it was made: a parameter that was
  // frozen or unfrozen since, and the way out, for people; "": none was.
  std::string RequiresGradChange() const;
  // The GIL is held: lets go of Python objects.
  void Clear() { adopt_ = {}; }

 private:
  std::string OwnerOf(PyObject* found, std::size_t but_unit, std::size_t but_parameter) const;
  // None where the user cannot say it of one parameter.
  std::optional<bool> RequiresGrad(std::size_t unit, std::size_t parameter) const;
  void CheckTies(PyObject* found, std::size_t unit, std::size_t parameter) const;

  const Plan& plan_;
  std::vector<UnitState>& units_;
  PyRef adopt_;
};

// "parameter layers.0.up.weight".
std::string ParameterText(const Plan& plan, UnitId unit, std::int32_t parameter);

}  // namespace shardplan::python
