// SPDX-License-Identifier: Apache-2.0
// The module hooks: Python callables implemented in C++, so that a hook's way into the replayer is one C
// call.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <vector>

#include "binding/py_ref.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::python {

class Runtime;

// What the hooks of a unit do besides firing triggers.
struct HookOptions {
  UnitId unit = -1;  // -1: a root that is no unit of the plan (it holds no parameter of its own)
  std::vector<const void*> modules;            // of the unit, as identities; see [Note: groups]
  std::optional<at::ScalarType> input_dtype;   // floating-point inputs are cast to it
  std::optional<at::ScalarType> output_dtype;  // and outputs to this
  // Modules that are not in training mode compute with parameters in full precision, and their inputs are
  // left as they are (fsdp1).
  bool full_precision_in_eval = false;
};

struct ModuleHooks {
  PyRef pre_forward;   // for register_forward_pre_hook(..., prepend=True, with_kwargs=True)
  PyRef post_forward;  // for register_forward_hook(...)
};

// One pair for all modules of a unit. Null members with a Python error set on failure.
ModuleHooks MakeModuleHooks(std::shared_ptr<Runtime> runtime, const HookOptions& options);

}  // namespace shardplan::python
