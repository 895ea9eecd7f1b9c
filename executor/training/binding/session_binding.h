// SPDX-License-Identifier: Apache-2.0
// Checkpoints for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace shardplan::python {

void BindSession(pybind11::module_& module);

}  // namespace shardplan::python
