// The input of commands about memory: a plan, or a trace that is planned first.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "plan_flags.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

struct MemoryInput {
  std::string path, strategy, cluster;
  std::int64_t ranks = 0;
  PlanFlags flags;
};

// INPUT, --ranks, --cluster, --strategy and the flags of `plan`.
void AddMemoryInput(CLI::App& command, MemoryInput& input);

// The plan that it names. A trace without --cluster is planned for a cluster that has nothing but ranks: no
// costs are needed.
Result<Plan> ReadMemoryInput(const MemoryInput& input);

}  // namespace shardplan::cli
