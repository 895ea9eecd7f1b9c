// SPDX-License-Identifier: Apache-2.0
#include "units/trace_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {
namespace {

struct PlacedDim {
  std::string name;
  std::int64_t size = 1, stride = 1;
};

// Dimensions that some parameter lies on, the innermost first.
Result<std::vector<PlacedDim>> PlacedDims(const Trace& trace) {
  std::vector<PlacedDim> dims;
  for (std::size_t p = 0; p < trace.parameters.size(); ++p) {
    for (std::size_t k = 0; k < trace.parameters[p].placements.size(); ++k) {
      const ParameterPlacement& placement = trace.parameters[p].placements[k];
      if (placement.size == 1) continue;
      if (std::ranges::find(dims, placement.mesh_dim, &PlacedDim::name) != dims.end()) continue;
      const auto lies = std::ranges::find(trace.communicators, placement.mesh_dim, &Communicator::name);
      if (lies == trace.communicators.end() || lies->size != placement.size || !lies->dims.empty()) {
        return MakeInputError(
            fmt::format("/parameters/{}/placements/{}", p, k),
            fmt::format("{} lies on mesh dimension {}, and the trace does not say which ranks that are and "
                        "whether they work on one batch",
                        trace.parameters[p].fqn, placement.mesh_dim),
            fmt::format("no communicator {} of {} ranks", placement.mesh_dim, placement.size),
            "a mesh in the strategy (--mesh), or a trace by this release");
      }
      dims.push_back({placement.mesh_dim, placement.size, lies->stride});
    }
  }
  std::ranges::sort(dims, {}, &PlacedDim::stride);
  return dims;
}

// Outermost first: the placed dimensions, and what lies between and around them to shard over.
Result<std::vector<StrategyMeshDim>> MeshAround(const std::vector<PlacedDim>& placed, std::int64_t ranks) {
  std::vector<StrategyMeshDim> dims;  // innermost first
  std::int64_t covered = 1;
  const auto add_data = [&](std::int64_t size) {
    if (size > 1) dims.push_back({dims.empty() ? "shard_inner" : fmt::format("shard_{}", dims.size()), size});
  };
  for (std::size_t d = 0; d < placed.size(); ++d) {
    const PlacedDim& dim = placed[d];
    if (dim.stride % covered != 0) {
      return MakeInputError("/mesh",
                            fmt::format("parameters lie on mesh dimensions that overlap, and no mesh of a "
                                        "strategy has both of them"),
                            fmt::format("{} of {} ranks, {} apart, and {} of {}", dim.name, dim.size,
                                        dim.stride, placed[d - 1].name, placed[d - 1].size),
                            "dimensions beside each other");
    }
    add_data(dim.stride / covered);
    dims.push_back({dim.name, dim.size});
    covered = dim.stride * dim.size;
  }
  if (ranks % covered != 0) {
    return MakeInputError("/mesh",
                          "the cluster's ranks are no multiple of the dimensions that parameters lie on",
                          fmt::format("{} ranks", ranks), fmt::format("a multiple of {}", covered));
  }
  dims.push_back({"shard", ranks / covered});
  std::ranges::reverse(dims);
  return dims;
}

std::vector<std::string> DimsOf(const Parameter& parameter, const std::vector<std::string>& data) {
  std::vector<std::string> dims = data;
  for (const ParameterPlacement& placement : parameter.placements) std::erase(dims, placement.mesh_dim);
  return dims;
}

// Before 2.15 a unit has one mesh: modules whose own parameters are on another one are units of their own.
void AddUnitsOfOtherMeshes(const Trace& trace, const std::vector<std::string>& data, Strategy& strategy) {
  std::map<std::vector<std::string>, std::vector<std::string>> by_dims;  // modules
  for (const Module& module : trace.modules) {
    if (module.parameters.empty() || !module.same_module_as.empty()) continue;
    const auto dims = [&](const NamedParameter& named) {
      return DimsOf(trace.parameters[static_cast<std::size_t>(named.parameter)], data);
    };
    const std::vector<std::string> first = dims(module.parameters.front());
    if (first.size() == data.size()) continue;
    const bool alike = std::ranges::all_of(module.parameters,
                                           [&](const NamedParameter& named) { return dims(named) == first; });
    if (alike) by_dims[first].push_back(module.fqn);
  }
  std::vector<UnitRule> rules;
  for (const auto& [dims, modules] : by_dims) {
    rules.push_back({.modules = modules, .data_parallel = DataParallelDims{.shard = dims, .replicate = {}}});
  }
  strategy.units.insert(strategy.units.begin(), rules.begin(), rules.end());
}

// Adds the meshes of parameters that lie on some of FSDP's dimensions to a unit's rule.
void AddParameterMeshes(const Trace& trace, const std::vector<std::string>& data, UnitRule& rule) {
  if (rule.data_parallel || !rule.parameter_meshes.empty()) return;
  std::map<std::vector<std::string>, std::vector<std::string>> by_dims;  // parameters
  for (const Parameter& parameter : trace.parameters) {
    const std::vector<std::string> dims = DimsOf(parameter, data);
    if (dims.size() < data.size()) by_dims[dims].push_back(parameter.fqn);
  }
  for (const auto& [dims, parameters] : by_dims) {
    rule.parameter_meshes.push_back({.parameters = parameters, .data_parallel = {.shard = dims}});
  }
}

}  // namespace

Result<Strategy> WithMeshOf(const Trace& trace, Strategy strategy, std::int64_t ranks) {
  if (strategy.policy != "fsdp2" || !strategy.mesh.empty() || strategy.data_parallel) return strategy;
  Result<std::vector<PlacedDim>> placed = PlacedDims(trace);
  if (!placed) return std::unexpected(std::move(placed.error()));
  if (placed->empty()) return strategy;
  Result<std::vector<StrategyMeshDim>> mesh = MeshAround(*placed, ranks);
  if (!mesh) return std::unexpected(std::move(mesh.error()));
  strategy.mesh = *std::move(mesh);
  DataParallelDims data;
  for (const StrategyMeshDim& dim : strategy.mesh) {
    if (std::ranges::find(trace.same_batch, dim.name) == trace.same_batch.end())
      data.shard.push_back(dim.name);
  }
  strategy.data_parallel = data;
  if (strategy.units.empty()) strategy.units = DefaultUnits(trace);
  if (strategy.pytorch.value_or(kNewestPyTorch) < PyTorchVersion::k2_15) {
    AddUnitsOfOtherMeshes(trace, data.shard, strategy);
  } else {
    for (UnitRule& rule : strategy.units) AddParameterMeshes(trace, data.shard, rule);
  }
  return strategy;
}

}  // namespace shardplan
