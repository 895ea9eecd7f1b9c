// SPDX-License-Identifier: Apache-2.0
// The plan's program as text that reads well and parses back (`shardplan show`), and the difference of two
// plans in words (`shardplan diff`).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// The whole plan, trigger by trigger, one instruction a line. ParsePlanText(PlanText(p)) == p for every plan.
std::string PlanText(const Plan& plan);
// kBadInput with pointer "line N" where a line does not parse.
Result<Plan> ParsePlanText(std::string_view text);

// One line of text for an instruction / trigger, with names instead of ids ("all_gather
// layers.0.all_gather_output on all_gather via shard"), as error messages and reports use it.
// `instruction`: of a procedure, or AsWritten.
std::string Describe(const Plan& plan, const Instruction& instruction);
std::string Describe(const Plan& plan, const Trigger& trigger, const Instruction& instruction);
std::string Describe(const Plan& plan, const Trigger& trigger);

// Sentences saying how b differs from a; empty when they are equal.
std::vector<std::string> DescribeDifferences(const Plan& a, const Plan& b);

}  // namespace shardplan
