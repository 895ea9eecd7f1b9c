// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace shardplan::python {

// Plan and its parts as read-only Python classes, and read_plan(path).
void BindPlan(pybind11::module_& module);

}  // namespace shardplan::python
