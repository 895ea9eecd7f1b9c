// SPDX-License-Identifier: Apache-2.0
// The time of a plan's step, in words.
#pragma once

#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

// The critical path of the step that repeats, by cause and by what is longest on it, and what the step would
// take without single causes.
Result<std::string> TimeText(const Plan& plan);

}  // namespace shardplan::cli
