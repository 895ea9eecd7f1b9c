// SPDX-License-Identifier: Apache-2.0
// Bytes that a copy of the plan moves.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan {

struct CopiedBytes {
  Bytes read;
  Bytes written;
};

// Takes any instruction with a `src` that is no collective. Its buffers exist.
CopiedBytes MovedBy(const Plan& plan, const Instruction& copy);

}  // namespace shardplan
