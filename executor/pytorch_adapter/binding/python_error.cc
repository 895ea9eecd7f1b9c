// SPDX-License-Identifier: Apache-2.0
#include "binding/python_error.h"

#include <c10/util/Exception.h>
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

void ThrowFailure(const Error& error, const std::exception_ptr& thrown) {
  if (thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const c10::OutOfMemoryError&) {
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "shardplan: " + ToString(error));
    } catch (const std::exception&) {
      // What the error says.
    }
  }
  Throw(error);
}

}  // namespace shardplan::python
