// SPDX-License-Identifier: Apache-2.0
#include "memory_input.h"

#include <fmt/format.h>

#include "cluster_names.h"
#include "flags/file_flag.h"
#include "flags/memory_budget.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/caching_allocator.h"
#include "support.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

Result<Plan> PlanFor(const MemoryInput& input, const Trace& trace) {
  Result<GivenStrategy> strategy = StrategyOf(input.strategy, input.flags);
  if (!strategy) return std::unexpected(strategy.error());
  if (Status made = ApplyTraceFlags(input.flags, trace, input.path, strategy->strategy); !made)
    return std::unexpected(made.error());
  ClusterFlags flags = input.cluster;
  flags.traced_ranks = trace.world_size;
  Result<ChosenCluster> chosen = ChooseCluster(flags, strategy->strategy, {.name = "memory only"});
  if (!chosen) return std::unexpected(chosen.error());
  // Policies that are built in make plans that verify.
  const PlanOptions options{.verify = strategy->library.has_value()};
  Result<PlannerOutput> planned =
      PlanTrace(trace, input.path, *strategy, input.strategy, chosen->cluster, options);
  if (!planned) return std::unexpected(planned.error());
  return std::move(planned->plan);
}

}  // namespace

void AddMemoryInput(CLI::App& command, MemoryInput& input) {
  command.add_option("INPUT", input.path, "A plan, or a trace that is planned first")->required();
  AddClusterFlags(
      command, input.cluster,
      "Device memory and context from this cluster: a file, a shipped one, or a device (h100); of a trace: "
      "default none");
  AddNoVerifyFlag(command, input.no_verify);
  AddFile(command, "--strategy", input.strategy, "Of a trace: a strategy file; flags go over it");
  AddPlanFlags(command, input.flags);
}

Result<Plan> ReadMemoryInput(const MemoryInput& input) {
  Result<Document> document = ReadDocument(input.path);
  if (!document) return std::unexpected(document.error());
  if (auto* plan = std::get_if<Plan>(&*document)) {
    if (Status verified = VerifyForUse(input.path, *plan, input.no_verify); !verified)
      return std::unexpected(verified.error());
    if (input.cluster.ranks > 0 && input.cluster.ranks != plan->world_size) {
      return std::unexpected(Error{.code = ErrorCode::kUsage,
                                   .message = "a plan is for the ranks that it was made for",
                                   .file = input.path,
                                   .pointer = "/world_size",
                                   .found = fmt::format("--ranks {}", input.cluster.ranks),
                                   .expected = fmt::format("{}", plan->world_size)});
    }
    if (!input.cluster.cluster.empty()) {
      Result<Cluster> found = FindCluster(input.cluster.cluster, plan->world_size);
      if (!found) return std::unexpected(found.error());
      Result<Cluster> resized = WithRanks(std::move(*found), plan->world_size);
      if (!resized) return std::unexpected(std::move(resized.error()));
      plan->cluster = std::move(*resized);
    }
    if (input.flags.alloc_conf) {
      if (Status checked = CheckAllocatorSettings(*input.flags.alloc_conf); !checked)
        return std::unexpected(checked.error());
      plan->strategy.alloc_conf = *input.flags.alloc_conf;
    }
    return std::move(*plan);
  }
  const auto* trace = std::get_if<Trace>(&*document);
  if (trace == nullptr) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "another kind of document",
                                 .file = input.path,
                                 .expected = "a trace or a plan"});
  }
  return PlanFor(input, *trace);
}

}  // namespace shardplan::cli
