// SPDX-License-Identifier: Apache-2.0
// Why is this event here? The text of `--explain`.
#pragma once

#include <string>

#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

// The step that repeats (or every step), trigger by trigger, each run of instructions under the reason that
// the policy gave for it, in words.
std::string ExplainPlan(const Plan& plan, bool every_step);

}  // namespace shardplan::cli
