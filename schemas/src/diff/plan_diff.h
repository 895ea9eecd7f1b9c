// SPDX-License-Identifier: Apache-2.0
// The parts of DescribeDifferences.
#pragma once

#include <string>
#include <vector>

#include "names/plan_names.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Two plans and the names in them. B's instructions are compared with A's by their words, never by ids.
struct PlanPair {
  const Plan& a;
  const Plan& b;
  PlanNames names_a;
  PlanNames names_b;
  PlanPair(const Plan& first, const Plan& second) : a(first), b(second), names_a(first), names_b(second) {}
};

// Scalars, strategy, cluster, units, buffers, streams, communicators, inputs.
std::vector<std::string> TableDifferences(const PlanPair& plans);
// Segments: operators, FLOPs, bytes, what they read and make.
std::vector<std::string> SegmentDifferences(const PlanPair& plans);
// Triggers and instructions of every step.
std::vector<std::string> ProgramDifferences(const PlanPair& plans);
// Differences of what is done on demand.
std::vector<std::string> ProcedureDifferences(const PlanPair& plans);

}  // namespace shardplan
