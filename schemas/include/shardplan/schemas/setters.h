// SPDX-License-Identifier: Apache-2.0
// What the setters of a strategy leave a unit with.
#pragma once

#include <string_view>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// Is the module `fqn` the module `above`, or below it?
bool IsUnder(std::string_view fqn, std::string_view above);

// The flag that the last call of `method` gives the unit, in the strategy's setup or, after that, in the step
// that repeats. False: none reaches it.
bool FlagSetOn(const Strategy& strategy, const Unit& unit, std::string_view method);

}  // namespace shardplan
