// SPDX-License-Identifier: Apache-2.0
// The instructions of a plan as lines that can be compared with another plan's: without ids, reasons, or the
// names of events, which say nothing. A record is told by the work it follows, a wait by the work it waits
// for.
#pragma once

#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "text/plan_words.h"

namespace shardplan {

struct DiffLine {
  std::string text;  // "all_gather ... on all_gather via shard", "compute waits for all_gather
                     // layers.0.all_gather_input"
  std::string unit;  // the unit it is about; "" unknown
  const Instruction* instruction = nullptr;
};

// [step][trigger][instruction]. Pointers go into the plan.
std::vector<std::vector<std::vector<DiffLine>>> DiffLinesOf(const Plan& plan);

}  // namespace shardplan
