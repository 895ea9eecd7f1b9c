// SPDX-License-Identifier: Apache-2.0
#include "passes/describe.h"

#include <utility>
#include <variant>

#include "shardplan/simulator/reserved_memory.h"
#include "units/model_communicators.h"

namespace shardplan {
namespace {

// Forwards that are trained on, in the step that repeats. The last backward counts of those that a trace
// calls for one batch.
std::int64_t TrainedForwards(const Trace& trace, const Strategy& strategy) {
  if (strategy.program.empty()) return 1;
  const auto last = static_cast<std::int32_t>(trace.backwards.size()) - 1;
  std::int64_t forwards = 0;
  for (const ProgramCall& call : strategy.program.back()) {
    const auto* backward = std::get_if<BackwardCall>(&call);
    const bool counts = backward != nullptr && (trace.calls.empty() || backward->trace == last);
    if (counts) forwards += static_cast<std::int64_t>(backward->microbatches.size());
  }
  return forwards;
}

}  // namespace

Result<Plan> DescribePlan(Plan plan, const PolicyInput& input, const PolicyPasses& policy,
                          const Cluster& cluster) {
  plan.model = input.trace.model;
  plan.policy = input.strategy.policy;
  plan.world_size = cluster.ranks;
  plan.mesh = input.partition.mesh;
  plan.cluster = cluster;
  plan.strategy = input.strategy;
  plan.inputs = input.trace.inputs;
  plan.model_buffers = input.trace.buffers;
  if (policy.change_buffers != nullptr) {
    if (Status s = policy.change_buffers(input, plan.model_buffers); !s) return std::unexpected(s.error());
  }
  plan.unmanaged = UnmanagedOf(input.trace, plan);
  plan.ranks_per_batch = RanksPerBatch(input.trace);
  plan.tokens_per_step = input.trace.tokens_per_batch * TrainedForwards(input.trace, input.strategy);
  return plan;
}

}  // namespace shardplan
