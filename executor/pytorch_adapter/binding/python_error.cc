#include "binding/python_error.h"

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "binding/py_ref.h"

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

void Throw(const Error& error) { throw std::runtime_error("shardplan: " + ToString(error)); }

void OrThrow(const Status& status) {
  if (!status) Throw(status.error());
}

}  // namespace shardplan::python
