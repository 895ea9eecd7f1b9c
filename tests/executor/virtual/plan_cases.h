// SPDX-License-Identifier: Apache-2.0
// The plans that the planner can make: every recording of PyTorch, every knob, and random models with random
// knobs.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::test {

struct PlanCase {
  std::string name;
  Trace trace;
  Strategy strategy;
  Cluster cluster;
  std::int64_t steps = 3;
};
inline void PrintTo(const PlanCase& c, std::ostream* os) { *os << c.name; }

// tests/conformance/{fsdp1,fsdp2}, "fsdp2/gptish_default_w2".
std::vector<std::string> RecordedNames();
PlanCase RecordedCase(const std::string& name);

// tests/planner/goldens: a strategy for every knob, "golden/fsdp2/hsdp".
std::vector<std::string> GoldenNames();
PlanCase GoldenCase(const std::string& name);

// Each knob of the strategy, and combinations that meet in one piece of code, on a small model.
std::vector<PlanCase> KnobCases();

// A random module tree, random units, random knobs.
PlanCase RandomCase(std::uint32_t seed);

// Golden strategies that PyTorch refuses: there is nothing to run.
const std::set<std::string>& RefusedByPyTorch();
// Cases that PyTorch itself computes wrongly, and how it shows. The verifier objects to these, too.
const std::map<std::string, std::string>& WrongInPyTorch();

}  // namespace shardplan::test
