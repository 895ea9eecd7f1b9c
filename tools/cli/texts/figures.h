// SPDX-License-Identifier: Apache-2.0
// Times and sizes in the units that tables print.
#pragma once

#include "shardplan/schemas/quantity.h"

namespace shardplan::cli {

inline double InMilliseconds(Nanoseconds time) { return static_cast<double>(time.value) / 1e6; }
inline double InGibibytes(Bytes size) { return static_cast<double>(size.value) / (1 << 30); }
inline double InMebibytes(Bytes size) { return static_cast<double>(size.value) / (1 << 20); }

}  // namespace shardplan::cli
