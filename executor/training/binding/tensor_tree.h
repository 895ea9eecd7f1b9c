// SPDX-License-Identifier: Apache-2.0
// The tensors inside a module's arguments and outputs: nested tuples, lists and dicts are walked here.
// Anything else is handed to FSDP2's own walk, where the installed torch has one (since 2.15: named tuples,
// dataclasses and subclasses of those containers; their tensors that require a gradient are found), or to
// torch.utils._pytree.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <vector>

#include "training/binding/py_ref.h"

namespace shardplan::python {

// Tensors of `object`, depth first, in the order torch.utils._pytree flattens them (dicts by insertion).
// Returns false with a Python error set when a registered pytree type fails to flatten.
bool CollectTensors(PyObject* object, std::vector<at::Tensor>& tensors);

// A copy of `object` in which the tensors, in the order of CollectTensors, are `tensors` (as many as were
// collected). Containers none of whose tensors changed are shared with `object`. Null with a Python error set
// on failure.
PyRef ReplaceTensors(PyObject* object, const std::vector<at::Tensor>& tensors);

// Is there anything in `object` but tensors, tuples, lists, dicts and plain values?
bool HasOtherContainers(PyObject* object);

// torch.distributed.utils._apply_to_tensors, with which PyTorch's FSDP casts: it looks into dataclasses, and
// not into everything that pytree knows. Null with a Python error set on failure.
PyRef CastAsPyTorch(PyObject* object, at::ScalarType dtype);

}  // namespace shardplan::python
