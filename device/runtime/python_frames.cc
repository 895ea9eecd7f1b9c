// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/python_frames.h"

#include <dlfcn.h>

#include <cstddef>
#include <map>
#include <mutex>

namespace shardplan::softdevice {
namespace {

constexpr std::size_t kMostFrames = 48;

// CPython's functions, under their own names; all of them are in every version since 3.11.
struct Python {
  int (*is_initialized)() = nullptr;
  int (*gil_check)() = nullptr;
  void* (*this_thread)() = nullptr;
  int (*gil_ensure)() = nullptr;
  void (*gil_release)(int) = nullptr;
  void* (*frame)() = nullptr;  // borrowed
  void* (*back)(void*) = nullptr;
  void* (*code)(void*) = nullptr;
  int (*line)(void*) = nullptr;
  void* (*attribute)(void*, const char*) = nullptr;
  const char* (*utf8)(void*) = nullptr;
  void (*increase)(void*) = nullptr;
  void (*decrease)(void*) = nullptr;
  void (*clear_error)() = nullptr;
  bool is_there = false;
};

template <typename Function>
bool Find(const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

const Python& ThePython() {
  static const Python python = [] {
    Python p;
    p.is_there = Find("Py_IsInitialized", p.is_initialized) && Find("PyGILState_Check", p.gil_check) &&
                 Find("PyGILState_GetThisThreadState", p.this_thread) &&
                 Find("PyGILState_Ensure", p.gil_ensure) && Find("PyGILState_Release", p.gil_release) &&
                 Find("PyEval_GetFrame", p.frame) && Find("PyFrame_GetBack", p.back) &&
                 Find("PyFrame_GetCode", p.code) && Find("PyFrame_GetLineNumber", p.line) &&
                 Find("PyObject_GetAttrString", p.attribute) && Find("PyUnicode_AsUTF8", p.utf8) &&
                 Find("Py_IncRef", p.increase) && Find("Py_DecRef", p.decrease) &&
                 Find("PyErr_Clear", p.clear_error);
    return p;
  }();
  return python;
}

// With Python's lock. Codes live for ever.
std::string TextOf(const Python& python, void* code, const char* attribute) {
  void* object = python.attribute(code, attribute);
  const char* text = object == nullptr ? nullptr : python.utf8(object);
  std::string result = text == nullptr ? "" : text;
  if (text == nullptr) python.clear_error();
  if (object != nullptr) python.decrease(object);
  return result;
}

struct Codes {
  std::mutex mutex;
  std::map<const void*, PythonCode> seen;
};
Codes& TheCodes() {
  static auto* const codes = new Codes();
  return *codes;
}

// With Python's lock.
void Keep(const Python& python, void* code) {
  Codes& codes = TheCodes();
  const std::lock_guard lock(codes.mutex);
  if (codes.seen.contains(code)) return;
  python.increase(code);
  codes.seen[code] = {TextOf(python, code, "co_filename"), TextOf(python, code, "co_qualname")};
}

bool HasRunPython(const Python& python) {
  return python.is_there && python.is_initialized() != 0 && python.this_thread() != nullptr;
}

}  // namespace

bool HoldsPythonsLock() {
  const Python& python = ThePython();
  return HasRunPython(python) && python.gil_check() != 0;
}

std::vector<PythonFrame> FramesOfThread() {
  const Python& python = ThePython();
  if (!HasRunPython(python)) return {};
  const int state = python.gil_ensure();
  std::vector<PythonFrame> frames;
  void* frame = python.frame();
  if (frame != nullptr) python.increase(frame);
  while (frame != nullptr && frames.size() < kMostFrames) {
    void* code = python.code(frame);
    Keep(python, code);
    frames.emplace_back(code, python.line(frame));
    python.decrease(code);
    void* back = python.back(frame);
    python.decrease(frame);
    frame = back;
  }
  if (frame != nullptr) python.decrease(frame);
  python.gil_release(state);
  return frames;
}

PythonCode CodeOf(const void* code) {
  Codes& codes = TheCodes();
  const std::lock_guard lock(codes.mutex);
  const auto found = codes.seen.find(code);
  return found == codes.seen.end() ? PythonCode{} : found->second;
}

}  // namespace shardplan::softdevice
