// What the fields of a strategy cannot say of its training loop, and planning relies on.
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// kBadInput, with the pointer of the call: a backward covers a micro-batch that has had no forward before, or
// one twice. Reading a strategy asks it, and planning.
Status CheckProgram(const Strategy& strategy);

}  // namespace shardplan
