// SPDX-License-Identifier: Apache-2.0
// The exceptions of a training that fails.
#pragma once

#include <exception>

#include "shardplan/executor/training_error.h"
#include "shardplan/schemas/error.h"

namespace shardplan::executor {

// Throws it as a TrainingError.
[[noreturn]] void Throw(const Error& error);
void OrThrow(const Status& status);
// ... or as a c10::OutOfMemoryError, if that is what a replayer's operation has thrown.
[[noreturn]] void ThrowFailure(const Error& error, const std::exception_ptr& thrown);

}  // namespace shardplan::executor
