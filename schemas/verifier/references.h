// SPDX-License-Identifier: Apache-2.0
// The plan holds together: every id names something, every instruction has the operands that its kind needs,
// in roles that make sense. The later rules may then index without looking.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {

// Reports (rule reference) what is wrong outside the steps. False if the plan cannot be interpreted.
bool CheckTables(const Plan& plan, Reporter& reporter);

// "": the unit's parameters have shapes that can be cut as it says, and a place of their own in a flat one.
std::string WhatIsWrongWithUnit(const Plan& plan, const Unit& unit);

// Reports what is wrong with one instruction. False if it cannot be interpreted.
bool CheckInstruction(const Plan& plan, const Instruction& instruction, Position at, Reporter& reporter);

}  // namespace shardplan::verifier
