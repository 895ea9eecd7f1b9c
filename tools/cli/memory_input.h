// SPDX-License-Identifier: Apache-2.0
// The input of commands about memory: a plan, or a trace that is planned first.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "flags/cluster_choice.h"
#include "flags/plan_flags.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

struct MemoryInput {
  std::string path, strategy;
  ClusterFlags cluster;
  bool no_verify = false;
  PlanFlags flags;
};

// INPUT, --ranks, --cluster, --strategy, --no-verify and the flags of `plan`.
void AddMemoryInput(CLI::App& command, MemoryInput& input);

// The plan that it names, verified. A trace without --cluster is planned for a cluster that has nothing but
// ranks: no costs are needed.
Result<Plan> ReadMemoryInput(const MemoryInput& input);

}  // namespace shardplan::cli
