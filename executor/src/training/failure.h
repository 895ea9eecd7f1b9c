// SPDX-License-Identifier: Apache-2.0
// What a training that fails throws.
#pragma once

#include <exception>

#include "shardplan/schemas/error.h"

namespace shardplan::executor {

// std::runtime_error with a message for a person.
[[noreturn]] void Throw(const Error& error);
void OrThrow(const Status& status);
// ... and c10::OutOfMemoryError, if that is what a replayer's operation has thrown.
[[noreturn]] void ThrowFailure(const Error& error, const std::exception_ptr& thrown);

}  // namespace shardplan::executor
