// SPDX-License-Identifier: Apache-2.0
#include "flags/cluster_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "cluster_names.h"
#include "flags/file_flag.h"

namespace shardplan::cli {
namespace {

// 0 without a mesh. The planner refuses a mesh that is none (a size below 1).
std::int64_t RanksOfMesh(const Strategy& strategy) {
  if (strategy.mesh.empty()) return 0;
  std::int64_t ranks = 1;
  for (const StrategyMeshDim& dim : strategy.mesh) {
    if (dim.size < 1 || __builtin_mul_overflow(ranks, dim.size, &ranks)) return 0;
  }
  return ranks;
}

std::string MeshText(const Strategy& strategy) {
  std::vector<std::string> dims;
  for (const StrategyMeshDim& dim : strategy.mesh) dims.push_back(fmt::format("{}={}", dim.name, dim.size));
  return fmt::format("{}", fmt::join(dims, " "));
}

}  // namespace

void AddClusterFlags(CLI::App& command, ClusterFlags& flags, const std::string& cluster_words) {
  AddFile(command, "--cluster", flags.cluster, cluster_words, "FILE|NAME");
  command
      .add_option(
          "--ranks", flags.ranks,
          "Of a trace: for how many ranks, so many devices of the cluster (default: the mesh's, those of "
          "a traced process group, the cluster's)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
}

std::int64_t WantedRanks(const ClusterFlags& flags, const Strategy& strategy) {
  if (flags.ranks > 0) return flags.ranks;
  const std::int64_t in_mesh = RanksOfMesh(strategy);
  if (in_mesh > 0 || !strategy.mesh.empty()) return in_mesh;
  return flags.traced_ranks > 1 ? flags.traced_ranks : 0;
}

Result<Cluster> WithRanks(Cluster cluster, std::int64_t ranks) {
  if (cluster.ranks == ranks) return cluster;
  if (ranks > cluster.ranks_per_node && cluster.links.size() == 1) {
    return MakeInputError(
        "/links",
        fmt::format("{} ranks are several nodes of {}, which has no link between nodes", ranks, cluster.name),
        "1 link", fmt::format("2, or {} ranks at most", cluster.ranks_per_node));
  }
  cluster.name = fmt::format("{} (as {} rank{})", cluster.name, ranks, ranks == 1 ? "" : "s");
  cluster.ranks = ranks;
  return cluster;
}

Result<ChosenCluster> ChooseCluster(const ClusterFlags& flags, const Strategy& strategy, Cluster otherwise,
                                    const ReadClusterFunction& read) {
  const std::int64_t in_mesh = RanksOfMesh(strategy);
  if (flags.ranks > 0 && in_mesh > 0 && flags.ranks != in_mesh) {
    return std::unexpected(
        Error{.code = ErrorCode::kUsage,
              .message = "--ranks and the mesh say different numbers of ranks",
              .found = fmt::format("--ranks {}", flags.ranks),
              .expected = fmt::format("{}, the ranks of the mesh {}", in_mesh, MeshText(strategy))});
  }
  const std::int64_t ranks = WantedRanks(flags, strategy);
  const char* from = flags.ranks > 0 ? "--ranks" : in_mesh > 0 ? "the mesh" : "the trace";
  if (flags.cluster.empty()) {
    const std::string name = otherwise.name;
    Result<Cluster> cluster = std::move(otherwise);
    if (ranks > 0) cluster = WithRanks(std::move(*cluster), ranks);
    if (!cluster) return std::unexpected(std::move(cluster.error()));
    std::string note =
        ranks > 0
            ? fmt::format("no --cluster is given: devices of {}, {} ranks as {} says", name, ranks, from)
            : fmt::format("no --cluster, --ranks or --mesh is given: {}, {} ranks", name, cluster->ranks);
    return ChosenCluster{std::move(*cluster), std::move(note)};
  }
  const Result<ClusterName> named = ResolveCluster(flags.cluster, ranks);
  if (!named) return std::unexpected(named.error());
  Result<Cluster> found = read(named->path);
  if (!found) return std::unexpected(std::move(found.error()));
  if (named->of_device && ranks == 0) {
    std::string note = fmt::format("no --ranks or --mesh is given: {}, {} ranks", found->name, found->ranks);
    return ChosenCluster{std::move(*found), std::move(note)};
  }
  if (flags.ranks > 0 || named->of_device) {
    const std::int64_t own = found->ranks;
    std::string note;
    if (own != ranks)
      note = fmt::format("{} has {} ranks: {} of its devices, as {} says", found->name, own, ranks, from);
    Result<Cluster> resized = WithRanks(std::move(*found), ranks);
    if (!resized) {
      resized.error().file = flags.cluster;
      return std::unexpected(std::move(resized.error()));
    }
    return ChosenCluster{std::move(*resized), std::move(note)};
  }
  if (in_mesh > 0 && in_mesh != found->ranks) {
    return MakeInputError(
        "/mesh",
        fmt::format("the mesh does not cover the cluster's ranks: --ranks {} takes so many devices of {}",
                    in_mesh, found->name),
        fmt::format("{} ({})", in_mesh, MeshText(strategy)), fmt::format("{}", found->ranks));
  }
  return ChosenCluster{std::move(*found), {}};
}

}  // namespace shardplan::cli
