// SPDX-License-Identifier: Apache-2.0
// What a copy of the plan moves.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan {

struct MovedBytes {
  Bytes read;
  Bytes written;
};

// Of any instruction with a `src` that is no collective. Its buffers exist.
MovedBytes MovedBy(const Plan& plan, const Instruction& copy);

}  // namespace shardplan
