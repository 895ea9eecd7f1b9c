// SPDX-License-Identifier: Apache-2.0
// Helpers that both writers of trace events share.
#pragma once

#include "shardplan/schemas/quantity.h"

namespace shardplan::internal {

inline constexpr int kTraceProcess = 1;
// PyTorch's default stream is 7 in Kineto's counting; others come behind it.
inline constexpr int kFirstTraceStream = 7;

// The format's times are microseconds. A double is exact to the nanosecond for a hundred days.
inline double TraceMicroseconds(Nanoseconds time) { return static_cast<double>(time.value) / 1000; }

}  // namespace shardplan::internal
