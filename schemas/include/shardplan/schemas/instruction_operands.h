// The operands of an instruction: one check for the verifier, the simulator and the executor.
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Every operand that the kind needs is there, and every id names something (-1: none). Where the host itself
// works (no stream), all memory is the host's. The error has no pointer.
//
// Which roles the buffers may have, and of which unit they are, is the verifier's.
Status CheckOperands(const Plan& plan, const Instruction& instruction);

}  // namespace shardplan
