// SPDX-License-Identifier: Apache-2.0
// The border to the interpreter: who holds its lock, and what it raised.
#pragma once

#include <torch/csrc/python_headers.h>

#include "shardplan/schemas/error.h"
#include "training/binding/python_lock.h"
#include "training/failure.h"

namespace shardplan::python {

// The error of a Python call that failed, as a Status.
Status PythonError(const char* doing);

using executor::OrThrow;
using executor::Throw;

// The GIL for a callback of the replayer, which runs without it.
class HoldGil {
 public:
  HoldGil() : held_(&PythonLock()) {}

 private:
  executor::HoldLock held_;
};

// Lets go of the GIL, if this thread holds it, while the replayer may block on other ranks.
class ReleaseGil {
 public:
  ReleaseGil() : released_(&PythonLock()) {}

 private:
  executor::ReleaseLock released_;
};

// For the user's code inside a trigger; see executor::InsideUserCode.
class InsidePython {
 public:
  InsidePython() : guards_(&PythonLock()) {}

 private:
  executor::InsideUserCode guards_;
};

}  // namespace shardplan::python
