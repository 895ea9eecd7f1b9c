// SPDX-License-Identifier: Apache-2.0
// One run of a planned step program on the virtual machine with checked numbers.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "shardplan/schemas/plan.h"
#include "tests/executor/virtual/checked_model.h"
#include "tests/executor/virtual/expected_values.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {

// Runs expected.steps() steps of `plan` (which is expected.plan(), or one with other instructions) on all
// ranks; the last rank runs `last_rank_plan` if there is one. An error of the replayer or the machine (a
// deadlock, ranks that issue different collectives) is the failure.
Findings RunChecked(const Plan& plan, ExpectedValues& expected, std::uint64_t seed,
                    const Plan* last_rank_plan = nullptr);

// Units of which the verifier says that a segment reads their parameters as they were before an optimizer
// step.
std::set<std::string> StaleUnits(const Plan& plan);

// Whether the model of numbers knows what `plan` does on demand. It takes gradients, and units that forwards
// read, from the trace; on demand every parameter that trains gets a gradient, and every unit is read.
bool HasNumbersOnDemand(const Plan& plan, const Trace& trace);
// Steps of an on-demand program that it knows: all but the last where gradients are kept, as that those are
// reduced without another backward is no call of any loop.
std::int64_t OnDemandStepsWithNumbers(const Plan& program);
// The program with calls that run the trace's first passes, which is where its numbers are from: what is done
// on demand has passes of its own.
Plan WithPassesOfTrace(Plan program);

// "" if what a run of the case's plan found is right: no failure, and stale parameters are read of the units
// of which the verifier says so.
std::string WhatIsWrong(const PlanCase& c, const std::set<std::string>& remarked, const Findings& findings);

}  // namespace shardplan::test
