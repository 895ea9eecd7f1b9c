// SPDX-License-Identifier: Apache-2.0
// Which knob takes away what is alive at a peak.
#pragma once

#include "shardplan/schemas/plan.h"
#include "shardplan/simulator/memory_explanation.h"

namespace shardplan::internal {

// Sets knob and knob_bytes of `alive` (its other fields are there), from what PyTorch's runtime does with
// such memory.
void AdviseKnob(const Plan& plan, AliveMemory& alive);

}  // namespace shardplan::internal
