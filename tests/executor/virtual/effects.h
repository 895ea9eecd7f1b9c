// SPDX-License-Identifier: Apache-2.0
// Effects of a plan that no number depends on.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// The plan without
// - collectives of one rank in place, which no backend does anything for;
// - with `unread_moves`: moves of parameters (copy_in, all_gather, copy_out, copy_to_device) whose result
// nothing
//   reads before it is freed or written anew, as a prefetch that comes to nothing. They still write memory.
Plan WithoutIdleWork(Plan plan, bool unread_moves);

}  // namespace shardplan::test
