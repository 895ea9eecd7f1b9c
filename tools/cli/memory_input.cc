#include "memory_input.h"

#include <algorithm>
#include <set>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/optimizer_tensors.h"
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

Bytes Blocks(Bytes bytes) { return {(bytes.value + 511) / 512 * 512}; }

UnmanagedParameters UnmanagedOf(const Trace& trace, const Plan& plan) {
  std::set<std::string_view> managed;
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& parameter : unit.parameters) {
      managed.insert(parameter.fqn);
      managed.insert(parameter.shared_with.begin(), parameter.shared_with.end());
    }
  }
  UnmanagedParameters unmanaged;
  for (const Parameter& parameter : trace.parameters) {
    const bool known = managed.contains(parameter.fqn) ||
                       std::ranges::any_of(parameter.shared_with,
                                           [&](const std::string& fqn) { return managed.contains(fqn); });
    if (known) continue;
    const OptimizerShard whole{.shape = parameter.shape, .dtype = parameter.dtype};
    unmanaged.parameter_bytes += Blocks(SizeBytes(whole));
    if (!parameter.requires_grad) continue;
    unmanaged.gradient_bytes += Blocks(SizeBytes(whole));
    for (const Bytes state : OptimizerStates(plan.strategy.optimizer, whole)) {
      unmanaged.state_bytes += Blocks(state);
    }
  }
  return unmanaged;
}

}  // namespace

void AddMemoryInput(CLI::App& command, MemoryInput& input) {
  command.add_option("INPUT", input.path, "A plan, or a trace that is planned first")->required();
  command
      .add_option("--ranks", input.ranks, "Of a trace: how many ranks (default: the mesh's, the cluster's)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  command.add_option("--cluster", input.cluster,
                     "Device memory and context from this cluster (of a trace: default none)");
  command.add_option("--strategy", input.strategy, "Of a trace: a strategy file; flags go over it");
  AddPlanFlags(command, input.flags);
}

Result<PlanAndUnmanaged> ReadMemoryInput(const MemoryInput& input) {
  Result<Document> document = ReadDocument(input.path);
  if (!document) return std::unexpected(document.error());
  if (auto* plan = std::get_if<Plan>(&*document)) {
    if (!input.cluster.empty()) {
      Result<Cluster> found = FindCluster(input.cluster);
      if (!found) return std::unexpected(found.error());
      plan->cluster = std::move(*found);
    }
    return PlanAndUnmanaged{std::move(*plan), {}};
  }
  const auto* trace = std::get_if<Trace>(&*document);
  if (trace == nullptr) {
    return MakeError(ErrorCode::kBadInput, input.path + " is neither a trace nor a plan");
  }
  Result<Plan> plan = PlanFor(input, *trace);
  if (!plan) return std::unexpected(plan.error());
  const UnmanagedParameters unmanaged = UnmanagedOf(*trace, *plan);
  return PlanAndUnmanaged{std::move(*plan), unmanaged};
}

}  // namespace shardplan::cli
