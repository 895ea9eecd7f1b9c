// SPDX-License-Identifier: Apache-2.0
// Plans with one thing changed.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// The position of an instruction.
struct Spot {
  std::size_t step = 0, trigger = 0, instruction = 0;
};

std::vector<Spot> AllSpots(const Plan& plan);
Instruction& InstructionAt(Plan& plan, Spot spot);
const Instruction& InstructionAt(const Plan& plan, Spot spot);

// All spots of instructions of one kind.
std::vector<Spot> SpotsOf(const Plan& plan, InstructionKind kind);

Plan Without(Plan plan, Spot spot);
// The instruction and the next one of the same trigger change places; the plan itself where there is no next
// one.
Plan Swapped(Plan plan, Spot spot);
// The instruction once more, right behind itself.
Plan Doubled(Plan plan, Spot spot);

// One random change that keeps every id valid: removes, doubles, swaps or moves an instruction, puts it on
// another stream, makes a wait wait for another event, adds or drops a stream that a free is safe after.
// `what` says it in words.
Plan RandomChange(Plan plan, std::mt19937_64& random, std::string& what);

}  // namespace shardplan::test
