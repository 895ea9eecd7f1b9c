// SPDX-License-Identifier: Apache-2.0
#include "flags/default_cluster.h"

#include <cstdint>
#include <utility>

#include "cluster_names.h"

namespace shardplan::cli {
namespace {

constexpr std::int64_t kRanksOfNode = 8;

}  // namespace

Result<ChosenCluster> ChooseClusterOrDefault(const ClusterFlags& flags, const Strategy& strategy,
                                             const std::string& strategy_path,
                                             const ReadClusterFunction& read) {
  Result<Cluster> otherwise = Cluster{};
  if (flags.cluster.empty()) {
    const Result<ClusterName> name =
        ResolveCluster(WantedRanks(flags, strategy) > kRanksOfNode ? kDefaultNodes : kDefaultNode, 0);
    otherwise = name ? read(name->path) : std::unexpected(name.error());
  }
  if (!otherwise) return std::unexpected(otherwise.error());
  Result<ChosenCluster> chosen = ChooseCluster(flags, strategy, std::move(*otherwise), read);
  if (!chosen && !chosen.error().pointer.empty() && chosen.error().file.empty())
    chosen.error().file = strategy_path;
  return chosen;
}

}  // namespace shardplan::cli
