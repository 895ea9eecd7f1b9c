// SPDX-License-Identifier: Apache-2.0
// The procedures of a plan, by the rules of steps.
#pragma once

#include <vector>

#include "shardplan/verifier/verifier.h"

namespace shardplan::verifier {

// The violations of the program of OnDemandProgramOf, in the places of the procedures; those outside of
// procedures are in the steps between. `verify`: of steps.
std::vector<Violation> ViolationsOfProcedures(const Plan& plan,
                                              std::vector<Violation> (*verify)(const Plan&));

}  // namespace shardplan::verifier
