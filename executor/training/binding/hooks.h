// SPDX-License-Identifier: Apache-2.0
// The module hooks: Python callables implemented in C++, so that a hook's way into the replayer is one C
// call.
#pragma once

#include <Python.h>

#include <memory>

#include "training/binding/py_ref.h"
#include "training/units/unit_hooks.h"

namespace shardplan::python {

class PythonRuntime;

struct ModuleHooks {
  PyRef pre_forward;   // for register_forward_pre_hook(..., prepend=True, with_kwargs=True)
  PyRef post_forward;  // for register_forward_hook(...)
};

// One pair for all modules of a unit. Null members with a Python error set on failure.
ModuleHooks MakeModuleHooks(std::shared_ptr<PythonRuntime> runtime, const executor::HookOptions& options);

}  // namespace shardplan::python
