// SPDX-License-Identifier: Apache-2.0
// The procedures of a plan, by the rules of steps.
#pragma once

#include <vector>

#include "shardplan/verifier/verifier.h"

namespace shardplan::verifier {

// What the program of on_demand.h violates, in the places of the procedures; what is in none of them is in
// the steps between. `verify`: of steps.
std::vector<Violation> ViolationsOfProcedures(const Plan& plan,
                                              std::vector<Violation> (*verify)(const Plan&));

}  // namespace shardplan::verifier
