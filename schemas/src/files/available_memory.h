// SPDX-License-Identifier: Apache-2.0
// Memory that this process may still take, looked at before it is taken.
#pragma once

#include <cstdint>
#include <string_view>

#include "shardplan/schemas/error.h"

namespace shardplan {

// Bytes: the least of what the machine has available, what the control groups of the process leave, and what
// its own limits (RLIMIT_AS, RLIMIT_DATA) leave.
std::int64_t AvailableMemoryBytes();

// kEnvironment when `what` ("reading it") needs more than there is; the message has both.
Status CheckMemory(std::string_view what, std::int64_t needed_bytes);

}  // namespace shardplan
