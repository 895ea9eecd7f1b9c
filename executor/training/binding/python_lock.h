// SPDX-License-Identifier: Apache-2.0
// The GIL as the lock of the model's language.
#pragma once

#include "training/user_lock.h"

namespace shardplan::python {

// One for all runtimes: it has no state.
executor::UserLock& PythonLock();

}  // namespace shardplan::python
