// SPDX-License-Identifier: Apache-2.0
#include "training/binding/python_error.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "training/binding/py_ref.h"

namespace shardplan::python {

Status PythonError(const char* doing) {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyRef text = PyRef::Steal(value ? PyObject_Str(value) : nullptr);
  const char* utf8 = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
  std::string message = fmt::format("{}: {}", doing, utf8 ? utf8 : "unknown Python error");
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return MakeError(ErrorCode::kInternal, std::move(message));
}

namespace {

class Gil final : public executor::UserLock {
 public:
  int Acquire() override { return static_cast<int>(PyGILState_Ensure()); }
  void Release(int acquired) override { PyGILState_Release(static_cast<PyGILState_STATE>(acquired)); }
  void* LetGo() override { return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; }
  void TakeAgain(void* held) override {
    if (held != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(held));
  }
};

}  // namespace

executor::UserLock& PythonLock() {
  static Gil gil;
  return gil;
}

}  // namespace shardplan::python
