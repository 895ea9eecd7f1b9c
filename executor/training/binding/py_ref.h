// SPDX-License-Identifier: Apache-2.0
// PyRef: an owning pointer to a Python object, for code that talks to the C API directly (the hooks do,
// because a pybind11 call costs more than everything else in them). The GIL must be held where one is copied
// or destroyed.
#pragma once

#include <Python.h>

#include <utility>

namespace shardplan::python {

class PyRef {
 public:
  PyRef() = default;
  // Takes over a new reference.
  static PyRef Steal(PyObject* object) { return PyRef(object); }
  // Adds a reference to a borrowed one.
  static PyRef Borrow(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }
  PyRef(const PyRef& other) : object_(other.object_) { Py_XINCREF(object_); }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PyRef() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

}  // namespace shardplan::python
