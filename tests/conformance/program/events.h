// SPDX-License-Identifier: Apache-2.0
// The events that a plan issues, in the form of the recordings' logs, and the comparison with them.
#pragma once

#include <string>
#include <vector>

#include "recording.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::conformance {

std::vector<LogEvent> Fsdp2Events(const Recording& recording, const Plan& plan);
std::vector<LogEvent> Fsdp1Events(const Recording& recording, const Plan& plan);

// The step of the plan that the recording's `step`-th one is.
const PlanStep& StepAt(const Plan& plan, std::int32_t step);

// One line of text with the keys that are compared.
std::string Text(const LogEvent& event, const std::string& policy);

struct Comparison {
  bool matches = false;
  std::string difference;  // the first one, with context
  std::string objection;   // what the verifier finds wrong with the plan first; empty: nothing
};
// Plans the recording and compares.
Comparison Compare(const Recording& recording);
// The recording with a plan that is there.
Comparison ComparePlan(const Recording& recording, const Plan& plan);

}  // namespace shardplan::conformance
