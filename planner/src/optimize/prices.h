// SPDX-License-Identifier: Apache-2.0
// Looks for the prices that prove most. The checker's own function says what they prove.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/optimization.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan::optimize {

// Positions at which windows end: the ends of the step and of its passes, and others evenly in the model's
// time.
std::vector<std::int64_t> ChooseCuts(const StepWork& work);

CertificateBranch FindPrices(const StepWork& work, const std::vector<std::int64_t>& cuts, LayoutKind layout,
                             Bytes budget);

}  // namespace shardplan::optimize
