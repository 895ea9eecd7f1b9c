// SPDX-License-Identifier: Apache-2.0
// A Python file of plain FSDP2 calls that set a model up as a strategy says (`shardplan export --fsdp2`).
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

// The file has apply_plan(model, mesh); before_forward(model, forward), before_backward(model, backward),
// before_optimizer_step(model) and after_step(model) where the loop has calls on modules; and
// after_optimizer_step(model) where an event follows the optimizer.
//
// `settings` as Fsdp2SettingsOf gives them. `about`: lines of the file's docstring. kNegative: settings that
// the file is not written for; the pointer is into the plan.
Result<std::string> Fsdp2Script(const Plan& plan, const Strategy& settings,
                                const std::vector<std::string>& about);

}  // namespace shardplan::cli
