// SPDX-License-Identifier: Apache-2.0
// The border to the interpreter: who holds its lock, and what it raised.
#pragma once

#include <torch/csrc/python_headers.h>

#include "python_lock.h"
#include "shardplan/schemas/error.h"
#include "training/failure.h"

namespace shardplan::python {

// The error of a Python call that failed, as a Status.
Status PythonError(const char* doing);

using executor::OrThrow;
using executor::Throw;

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

// For the user's code inside a trigger; see executor::InsideUserCode.
class InsidePython {
 public:
  InsidePython() : guards_(&PythonLock()) {}

 private:
  executor::InsideUserCode guards_;
};

}  // namespace shardplan::python
