// SPDX-License-Identifier: Apache-2.0
// The tables of a plan: which unit owns a buffer, and which parameters buffers and segments name.
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Every buffer's unit exists (-1: none), and every parameter that a buffer or a segment's gradient names is
// one of its unit's. kBadInput with the JSON pointer. Checked by the readers, and by the replayer, whose plan
// may come from a program.
Status CheckOwners(const Plan& plan);

}  // namespace shardplan
