// SPDX-License-Identifier: Apache-2.0
// Changes of the user on the sharded parameters since the step before.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "training/binding/parameters/python_parameter.h"
#include "training/parameters/unit_state.h"

namespace shardplan::python {

// Members throw std::runtime_error with a message for a person.
class ParameterChanges {
 public:
  // Both outlive this.
  ParameterChanges(const Plan& plan, const std::vector<executor::UnitState>& units)
      : plan_(plan), units_(units), parameters_(plan.units.size()) {}

  // Adds the next parameter of the unit, in the order of Unit::parameters; it outlives this.
  void Add(UnitId unit, PythonParameter& parameter);

  // adopt(unit, parameter, found): the modules hold another sharded parameter than they were given, or there
  // is another tensor in it: makes it ours, or raises.
  void SetAdopt(PyRef adopt) { adopt_ = std::move(adopt); }
  // Takes over what the modules hold, of the units that are sharded. Takes the GIL.
  void Adopt();
  // The GIL is held: lets go of Python objects.
  void Clear() { adopt_ = {}; }

 private:
  std::string OwnerOf(PyObject* found, const PythonParameter& but) const;
  void CheckTies(PyObject* found, std::size_t unit, std::size_t parameter) const;

  const Plan& plan_;
  const std::vector<executor::UnitState>& units_;
  std::vector<std::vector<PythonParameter*>> parameters_;  // by unit; of a flat one none
  PyRef adopt_;
};

}  // namespace shardplan::python
