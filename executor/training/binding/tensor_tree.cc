// SPDX-License-Identifier: Apache-2.0
#include "training/binding/tensor_tree.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>

namespace shardplan::python {
namespace {

enum class NodeKind { kTensor, kLeaf, kTuple, kList, kDict, kOther };

NodeKind KindOf(PyObject* object) {
  if (object == Py_None) return NodeKind::kLeaf;
  if (THPVariable_Check(object)) return NodeKind::kTensor;
  PyTypeObject* type = Py_TYPE(object);
  if (type == &PyTuple_Type) return NodeKind::kTuple;
  if (type == &PyList_Type) return NodeKind::kList;
  if (type == &PyDict_Type) return NodeKind::kDict;
  if (type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type) {
    return NodeKind::kLeaf;
  }
  return NodeKind::kOther;
}

// torch.utils._pytree.tree_flatten(object) -> (leaves, spec), or null with an error set.
PyRef FlattenWithPytree(PyObject* object) {
  static PyObject* flatten = nullptr;  // lives as long as the interpreter
  if (flatten == nullptr) {
    PyRef module = PyRef::Steal(PyImport_ImportModule("torch.utils._pytree"));
    if (!module) return {};
    flatten = PyObject_GetAttrString(module.get(), "tree_flatten");
    if (flatten == nullptr) return {};
  }
  return PyRef::Steal(PyObject_CallOneArg(flatten, object));
}

// FSDP2's own walk, of the tensors that require a gradient. Null members: the installed torch asks pytree.
struct OwnWalk {
  PyObject* collect = nullptr;  // these live as long as the interpreter
  PyObject* replace = nullptr;
};

OwnWalk FindOwnWalk() {
  OwnWalk walk;
  const PyRef common = PyRef::Steal(PyImport_ImportModule("torch.distributed.fsdp._common_utils"));
  if (common) {
    walk.collect = PyObject_GetAttrString(common.get(), "collect_grad_tensors");
    if (walk.collect != nullptr) walk.replace = PyObject_GetAttrString(common.get(), "replace_grad_tensors");
  }
  PyErr_Clear();
  return walk.replace != nullptr ? walk : OwnWalk();
}

const OwnWalk& TheOwnWalk() {
  static const OwnWalk walk = FindOwnWalk();
  return walk;
}

// A leaf of pytree flattens to itself: not a container that we could look into.
bool IsPytreeLeaf(PyObject* flattened, PyObject* object) {
  PyObject* leaves = PyTuple_GetItem(flattened, 0);
  return PyList_Size(leaves) == 1 && PyList_GetItem(leaves, 0) == object;
}

bool CollectOther(PyObject* object, std::vector<at::Tensor>& tensors) {
  if (PyObject* collect = TheOwnWalk().collect; collect != nullptr) {
    const PyRef found = PyRef::Steal(PyObject_CallOneArg(collect, object));
    if (!found) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(found.get()); ++i) {
      tensors.push_back(THPVariable_Unpack(PyTuple_GetItem(found.get(), i)));
    }
    return true;
  }
  PyRef flattened = FlattenWithPytree(object);
  if (!flattened) return false;
  if (IsPytreeLeaf(flattened.get(), object)) return true;
  PyObject* leaves = PyTuple_GetItem(flattened.get(), 0);
  for (Py_ssize_t i = 0; i < PyList_Size(leaves); ++i) {
    PyObject* leaf = PyList_GetItem(leaves, i);
    if (THPVariable_Check(leaf)) tensors.push_back(THPVariable_Unpack(leaf));
  }
  return true;
}

class Replacer {
 public:
  explicit Replacer(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  PyRef Replace(PyObject* object) {
    switch (KindOf(object)) {
      case NodeKind::kLeaf:
        return PyRef::Borrow(object);
      case NodeKind::kTensor:
        return ReplaceTensor(object);
      case NodeKind::kTuple:
        return ReplaceSequence(object, PyTuple_Size, PyTuple_GetItem, PyTuple_New, PyTuple_SetItem);
      case NodeKind::kList:
        return ReplaceSequence(object, PyList_Size, PyList_GetItem, PyList_New, PyList_SetItem);
      case NodeKind::kDict:
        return ReplaceDict(object);
      case NodeKind::kOther:
        return ReplaceOther(object);
    }
    return {};
  }

 private:
  PyRef ReplaceTensor(PyObject* object) {
    const at::Tensor& tensor = tensors_[next_++];
    if (tensor.unsafeGetTensorImpl() == THPVariable_Unpack(object).unsafeGetTensorImpl()) {
      return PyRef::Borrow(object);
    }
    return PyRef::Steal(THPVariable_Wrap(tensor));
  }

  template <typename Size, typename Get, typename New, typename Set>
  PyRef ReplaceSequence(PyObject* object, Size size, Get get, New make, Set set) {
    const Py_ssize_t count = size(object);
    PyRef copy = PyRef::Steal(make(count));
    if (!copy) return {};
    bool changed = false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = get(object, i);
      PyRef replaced = Replace(item);
      if (!replaced) return {};
      changed |= replaced.get() != item;
      set(copy.get(), i, replaced.release());
    }
    return changed ? copy : PyRef::Borrow(object);
  }

  PyRef ReplaceDict(PyObject* object) {
    PyRef copy = PyRef::Steal(PyDict_New());
    if (!copy) return {};
    bool changed = false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(object, &position, &key, &value);) {
      PyRef replaced = Replace(value);
      if (!replaced || PyDict_SetItem(copy.get(), key, replaced.get()) != 0) return {};
      changed |= replaced.get() != value;
    }
    return changed ? copy : PyRef::Borrow(object);
  }

  PyRef ReplaceAsPyTorch(const OwnWalk& walk, PyObject* object) {
    const PyRef found = PyRef::Steal(PyObject_CallOneArg(walk.collect, object));
    if (!found) return {};
    const PyRef replaced =
        ReplaceSequence(found.get(), PyTuple_Size, PyTuple_GetItem, PyTuple_New, PyTuple_SetItem);
    if (!replaced) return {};
    if (replaced.get() == found.get()) return PyRef::Borrow(object);
    const PyRef next = PyRef::Steal(PyObject_GetIter(replaced.get()));
    return next ? PyRef::Steal(PyObject_CallFunctionObjArgs(walk.replace, object, next.get(), nullptr))
                : PyRef();
  }

  PyRef ReplaceOther(PyObject* object) {
    if (const OwnWalk& walk = TheOwnWalk(); walk.collect != nullptr) return ReplaceAsPyTorch(walk, object);
    PyRef flattened = FlattenWithPytree(object);
    if (!flattened) return {};
    if (IsPytreeLeaf(flattened.get(), object)) return PyRef::Borrow(object);
    PyObject* leaves = PyTuple_GetItem(flattened.get(), 0);
    bool changed = false;
    for (Py_ssize_t i = 0; i < PyList_Size(leaves); ++i) {
      PyObject* leaf = PyList_GetItem(leaves, i);
      if (!THPVariable_Check(leaf)) continue;
      PyRef replaced = ReplaceTensor(leaf);
      if (!replaced) return {};
      changed |= replaced.get() != leaf;
      PyList_SetItem(leaves, i, replaced.release());
    }
    if (!changed) return PyRef::Borrow(object);
    PyRef module = PyRef::Steal(PyImport_ImportModule("torch.utils._pytree"));
    if (!module) return {};
    return PyRef::Steal(PyObject_CallMethod(module.get(), "tree_unflatten", "OO", leaves,
                                            PyTuple_GetItem(flattened.get(), 1)));
  }

  const std::vector<at::Tensor>& tensors_;
  std::size_t next_ = 0;
};

}  // namespace

bool CollectTensors(PyObject* object, std::vector<at::Tensor>& tensors) {
  switch (KindOf(object)) {
    case NodeKind::kLeaf:
      return true;
    case NodeKind::kTensor:
      tensors.push_back(THPVariable_Unpack(object));
      return true;
    case NodeKind::kTuple:
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
        if (!CollectTensors(PyTuple_GET_ITEM(object, i), tensors)) return false;
      }
      return true;
    case NodeKind::kList:
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
        if (!CollectTensors(PyList_GET_ITEM(object, i), tensors)) return false;
      }
      return true;
    case NodeKind::kDict: {
      PyObject* value = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(object, &position, nullptr, &value);) {
        if (!CollectTensors(value, tensors)) return false;
      }
      return true;
    }
    case NodeKind::kOther:
      return CollectOther(object, tensors);
  }
  return true;
}

PyRef ReplaceTensors(PyObject* object, const std::vector<at::Tensor>& tensors) {
  return Replacer(tensors).Replace(object);
}

bool HasOtherContainers(PyObject* object) {
  switch (KindOf(object)) {
    case NodeKind::kLeaf:
    case NodeKind::kTensor:
      return false;
    case NodeKind::kTuple:
    case NodeKind::kList:
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        if (HasOtherContainers(PySequence_Fast_GET_ITEM(object, i))) return true;
      }
      return false;
    case NodeKind::kDict: {
      PyObject* value = nullptr;
      for (Py_ssize_t position = 0; PyDict_Next(object, &position, nullptr, &value);) {
        if (HasOtherContainers(value)) return true;
      }
      return false;
    }
    case NodeKind::kOther:
      return true;
  }
  return true;
}

PyRef CastAsPyTorch(PyObject* object, at::ScalarType dtype) {
  const PyRef functools = PyRef::Steal(PyImport_ImportModule("functools"));
  const PyRef utils = PyRef::Steal(PyImport_ImportModule("torch.distributed.utils"));
  const PyRef common =
      PyRef::Steal(PyImport_ImportModule("torch.distributed.fsdp._fully_shard._fsdp_common"));
  if (!functools || !utils || !common) return {};
  const PyRef cast = PyRef::Steal(PyObject_GetAttrString(common.get(), "_cast_fp_tensor"));
  PyObject* name = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
  if (!cast) return {};
  const PyRef to_dtype =
      PyRef::Steal(PyObject_CallMethod(functools.get(), "partial", "OO", cast.get(), name));
  if (!to_dtype) return {};
  return PyRef::Steal(PyObject_CallMethod(utils.get(), "_apply_to_tensors", "OO", to_dtype.get(), object));
}

}  // namespace shardplan::python
