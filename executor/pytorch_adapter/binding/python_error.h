// SPDX-License-Identifier: Apache-2.0
// The border to the interpreter: who holds its lock, and what it raised.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/python_headers.h>

#include <exception>

#include "shardplan/schemas/error.h"

namespace shardplan::python {

// The error of a Python call that failed, as a Status.
Status PythonError(const char* doing);

// As a std::runtime_error with a message for a person: hooks hand it on to Python as RuntimeError.
[[noreturn]] void Throw(const Error& error);
void OrThrow(const Status& status);
// ... and as torch.OutOfMemoryError, if that is what a replayer's operation has thrown.
[[noreturn]] void ThrowFailure(const Error& error, const std::exception_ptr& thrown);

// The GIL for a callback of the replayer, which runs without it.
class HoldGil {
 public:
  HoldGil() : state_(PyGILState_Ensure()) {}
  ~HoldGil() { PyGILState_Release(state_); }
  HoldGil(const HoldGil&) = delete;
  HoldGil& operator=(const HoldGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Lets go of the GIL, if this thread holds it, while the replayer may block on other ranks.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

// For the user's code inside a trigger, which runs without the GIL and below autograd: the GIL, every
// dispatch key, no gradients recorded.
class InsideUserCode {
 public:
  InsideUserCode() : keys_(c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})) {}

 private:
  HoldGil gil_;
  c10::impl::ForceDispatchKeyGuard keys_;
  at::NoGradGuard no_grad_;
};

}  // namespace shardplan::python
