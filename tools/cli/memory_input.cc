#include "memory_input.h"

#include <algorithm>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "support.h"

namespace shardplan::cli {
namespace {

Result<Plan> PlanFor(const MemoryInput& input, const Trace& trace) {
  const Result<Strategy> strategy = StrategyOf(input.strategy, input.flags);
  if (!strategy) return std::unexpected(strategy.error());
  Cluster cluster{.name = "memory only"};
  if (!input.cluster.empty()) {
    Result<Cluster> found = FindCluster(input.cluster);
    if (!found) return std::unexpected(found.error());
    cluster = std::move(*found);
  }
  if (input.ranks > 0) {
    cluster.ranks = input.ranks;
  } else if (!strategy->mesh.empty()) {
    cluster.ranks = 1;
    for (const StrategyMeshDim& dim : strategy->mesh) cluster.ranks *= dim.size;
  }
  Result<PlannerOutput> planned =
      PlanTrace(trace, input.path, *strategy, input.strategy, cluster, {.verify = false});
  if (!planned) return std::unexpected(planned.error());
  return std::move(planned->plan);
}

}  // namespace

void AddMemoryInput(CLI::App& command, MemoryInput& input) {
  command.add_option("INPUT", input.path, "A plan, or a trace that is planned first")->required();
  command
      .add_option("--ranks", input.ranks, "Of a trace: how many ranks (default: the mesh's, the cluster's)")
      ->check(CLI::PositiveNumber);
  command.add_option("--cluster", input.cluster,
                     "Device memory and context from this cluster (of a trace: default none)");
  command.add_option("--strategy", input.strategy, "Of a trace: a strategy file; flags go over it");
  AddPlanFlags(command, input.flags);
}

Result<Plan> ReadMemoryInput(const MemoryInput& input) {
  Result<Document> document = ReadDocument(input.path);
  if (!document) return std::unexpected(document.error());
  if (auto* plan = std::get_if<Plan>(&*document)) {
    if (!input.cluster.empty()) {
      Result<Cluster> found = FindCluster(input.cluster);
      if (!found) return std::unexpected(found.error());
      plan->cluster = std::move(*found);
    }
    return std::move(*plan);
  }
  const auto* trace = std::get_if<Trace>(&*document);
  if (trace == nullptr) {
    return MakeError(ErrorCode::kBadInput, input.path + " is neither a trace nor a plan");
  }
  return PlanFor(input, *trace);
}

}  // namespace shardplan::cli
